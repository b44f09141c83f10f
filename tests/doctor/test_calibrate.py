"""What calibration says of its measurements, and where it keeps them."""

from __future__ import annotations

import pytest
import torch

from tightfit.backends.pytorch.measure.calibration import measure as measuring
from tightfit.calibration import Calibration, CopyRates, Curve, Grid, LinkRates, load, processor, torch_version
from tightfit.doctor.calibrate import calibrate, calibration_rows
from tightfit.errors import RecipeError, Refused


def grid(best):
    return Grid(sizes=(16, 64), rates=(((best / 4, best / 2), (best / 3, best)),) * 2)


def made(**changes):
    values = {"device": "CPU", "kind": "cpu", "processor": processor(), "torch": torch_version(), "threads": 2}
    return Calibration(**{**values, **changes})


def test_each_figure_is_the_best_that_was_measured():
    rows = dict(calibration_rows(made(
        matmuls={"float32": grid(2e11)},
        attention={"forward 64": {"float32": Curve((64, 256), (1e10, 3e10))},
                   "forward 128": {"bfloat16": Curve((64,), (5e10,))}},
        memory={"add": {"float32": Curve((1e3, 1e8), (1e-6, 1e-2))}}, host={"forward": 1.5e-5, "backward": 8e-6},
    )))
    assert rows["matmuls in float32"] == "0.20 TFLOP/s at best"
    assert rows["attention forward"] == "0.05 TFLOP/s at best, in bfloat16"
    assert "attention backward" not in rows
    assert rows["memory"] == "10.0 GB/s in additions"
    assert rows["host"] == "microseconds an op: forward 15.0, backward 8.0"
    assert rows["threads"] == "2"


def test_a_card_of_the_catalogue_is_set_beside_its_data_sheet():
    rows = dict(calibration_rows(made(
        device="NVIDIA L4", kind="cuda", threads=0, matmuls={"bfloat16": grid(60.5e12)},
        memory={"add": {"float32": Curve((3e8,), (2e-3,))}}, link=LinkRates(
            to_device=CopyRates(alone=24e9, both_ways=20e9, pageable=9e9),
            to_host=CopyRates(alone=25e9, both_ways=21e9, pageable=8e9)),
    )))
    assert rows["matmuls in bfloat16"] == "60.50 TFLOP/s at best, 50% of the data sheet's 121"
    assert rows["memory"] == "150.0 GB/s in additions, 50% of the data sheet's 300"
    assert rows["host to device"] == (
        "24.0 GB/s, 76% of the data sheet's 32; 20.0 while copies go both ways; 9.0 from memory that is not "
        "page-locked")
    assert rows["device to host"].startswith("25.0 GB/s, 79% of")


def test_a_machine_that_locks_no_memory_is_said():
    rows = dict(calibration_rows(made(device="NVIDIA L4", kind="cuda", threads=0)))
    assert rows["host to device"] == "not measured: no memory of the host could be page-locked"
    assert "host to device" not in dict(calibration_rows(made()))


def test_what_is_measured_is_kept_for_plans(tmp_path, monkeypatch):
    def measure(device, progress):
        assert device == torch.device("cpu")
        progress("matmuls", 0.5)
        return made(threads=torch.get_num_threads())

    monkeypatch.setattr(measuring, "measure", measure)
    told = []
    found, path = calibrate("cpu", lambda *words: told.append(words), tmp_path)
    assert told == [("matmuls", 0.5)]
    assert path.parent == tmp_path
    assert load("CPU", tmp_path, threads=torch.get_num_threads()) == found


def test_what_was_measured_on_a_busy_machine_is_not_kept(tmp_path, monkeypatch):
    slow = Grid((16, 256), (((7e9, 4e10), (2e10, 7e10)), ((2e10, 9e10), (8e10, 8e7))))
    monkeypatch.setattr(measuring, "measure", lambda device, progress: made(matmuls={"float32": slow}))
    with pytest.raises(Refused, match=r"a float32 matmul ran at less than a 10th of .*: .* busy"):
        calibrate("cpu", folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_gpu_is_said():
    with pytest.raises(Refused, match="device=cpu"):
        calibrate("cuda")


def test_other_devices_are_refused():
    with pytest.raises(RecipeError, match="'tpu'"):
        calibrate("tpu")

"""The record of a calibration: interpolation by hand, and what a file may be used for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.failing import failing
from tightfit import calibration, files
from tightfit.calibration import FAMILIES, Calibration, CopyRates, Curve, Grid, LinkRates, family_of, load, save
from tightfit.errors import TightfitError

RATES = tuple(tuple(tuple(10.0 ** (i + 2 * j + 3 * h) for h in range(2)) for j in range(2)) for i in range(2))


def made(**changes):
    values = {
        "device": "CPU", "kind": "cpu", "processor": calibration.processor(), "torch": calibration.torch_version(),
        "threads": 2, "date": "2026-01-01", "matmuls": {"float32": Grid((10, 1000), RATES)},
        "attention": {"forward 64": {"float32": Curve((64, 256), (1e9, 2e9))},
                      "forward 256": {"float32": Curve((64, 256), (4e9, 8e9))}},
        "memory": {"add": {"float32": Curve((100.0, 10000.0), (1e-6, 1e-4)), "bfloat16": Curve((100.0,), (5e-6,))},
                   "tanh": {"float32": Curve((100.0,), (3e-6,))}},
        "host": {"forward": 1e-5, "backward": 5e-6},
    }
    return Calibration(**{**values, **changes})


def test_a_curve_is_straight_on_a_log_log_scale():
    curve = Curve((10.0, 1000.0), (1.0, 16.0))
    assert curve.at(10) == pytest.approx(1.0)
    assert curve.at(100) == pytest.approx(4.0)
    assert (curve.at(1), curve.at(10**6)) == pytest.approx((1.0, 16.0))
    assert (curve.beyond(1), curve.beyond(5000)) == pytest.approx((1.0, 80.0))


def test_a_grid_meets_its_points_and_takes_the_geometric_mean_between_them():
    grid = Grid((10, 1000), RATES)
    for i, m in enumerate(grid.sizes):
        for j, n in enumerate(grid.sizes):
            for h, k in enumerate(grid.sizes):
                assert grid.rate(m, n, k) == pytest.approx(RATES[i][j][h])
    assert grid.rate(100, 10, 10) == pytest.approx(10**0.5)
    assert grid.rate(100, 100, 100) == pytest.approx(10**3)
    assert grid.rate(1, 10**6, 1) == pytest.approx(10**2)
    assert sum(share for _, share in grid.corners(70, 30, 900)) == pytest.approx(1.0)


def test_what_was_not_measured_is_taken_as_its_nearest():
    found = made()
    assert found.memory_seconds("add", "float32", 1000) == pytest.approx(1e-5)
    assert found.memory_seconds("add", "float32", 20000) == pytest.approx(2e-4)
    assert found.memory_seconds("add", "float16", 100) == pytest.approx(5e-6)  # the other 16-bit format
    assert found.memory_seconds("add", "int64", 100) == pytest.approx(1e-6)
    assert found.memory_seconds("gelu", "float32", 100) == pytest.approx(1e-6)
    assert found.memory_seconds("tanh", "bfloat16", 100) == pytest.approx(3e-6)
    assert replace(found, memory={}).memory_seconds("add", "float32", 100) is None
    assert found.attention_rate("forward", "bfloat16", 128, 128) == pytest.approx((2**0.5 * 1e9 * 2**0.5 * 4e9) ** 0.5)
    assert found.attention_rate("forward", "float32", 64, 1000) == pytest.approx(4e9)
    assert found.attention_rate("backward", "float32", 64, 64) is None


def test_families_share_no_op():
    names = [name for members in FAMILIES.values() for name in members]
    assert len(names) == len(set(names))
    assert all(not members or family in members for family, members in FAMILIES.items())
    assert (family_of("aten.tanh.default"), family_of("tanh")) == ("tanh", "tanh")
    assert (family_of("aten.frobnicate.default"), family_of("aten.frobnicate_.default")) == ("add", "add_")
    assert family_of("fused add mul tanh") == "add"


def test_a_record_comes_back_as_it_was(tmp_path):
    path = save(made(), tmp_path / "new" / "folder")
    assert load("CPU", tmp_path / "new" / "folder", threads=2) == made()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_records_of_other_devices_and_threads_lie_beside_it(tmp_path):
    card = made(device="NVIDIA H100 80GB HBM3", kind="cuda", threads=0)
    for record in (made(), made(threads=1), card):
        save(record, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert load("NVIDIA H100 80GB HBM3", tmp_path) == card
    assert load("CPU", tmp_path, threads=1) == made(threads=1)
    assert load("CPU", tmp_path, threads=4) is None
    assert load("NVIDIA A100", tmp_path) is None


def test_what_was_measured_of_the_link_comes_back(tmp_path):
    rates = CopyRates(alone=5e10, both_ways=4e10, pageable=1e10)
    card = made(device="NVIDIA H100 80GB HBM3", kind="cuda", threads=0, link=LinkRates(to_device=rates, to_host=rates))
    save(card, tmp_path)
    assert load(card.device, tmp_path) == card


@pytest.mark.parametrize("changes", [{"processor": "another, 2 cores"}, {"torch": "0.4.1"}])
def test_a_record_of_another_machine_does_not_count(tmp_path, changes):
    save(made(**changes), tmp_path)
    assert load("CPU", tmp_path, threads=2) is None


def test_a_damaged_record_counts_as_none(tmp_path):
    path = save(made(), tmp_path)
    whole = path.read_text()
    values = json.loads(whole)
    broken = {**values["calibration"], "matmuls": {"float32": {"sizes": [1]}}}
    for text in ("", "{", whole[:-20], "[]", "null", json.dumps({**values, "format": 99}),
                 json.dumps({**values, "calibration": broken})):
        path.write_text(text)
        assert load("CPU", tmp_path, threads=2) is None, text[:40]


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    save(made(), tmp_path)
    monkeypatch.setattr(files.os, "fsync", failing(OSError(28, "No space left on device")))
    with pytest.raises(TightfitError, match="No space left"):
        save(made(date="2030-01-01"), tmp_path)
    monkeypatch.undo()
    assert load("CPU", tmp_path, threads=2) == made()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_is_a_file_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(TightfitError, match="file"):
        save(made(), blocked)
    assert load("CPU", blocked, threads=2) is None

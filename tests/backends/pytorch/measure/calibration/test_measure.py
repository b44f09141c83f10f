"""Measuring the machine at hand, at sizes so small that it takes a moment: what is measured, not how fast it is."""

from __future__ import annotations

import time

import pytest
import torch

from tightfit import calibration
from tightfit.backends.pytorch.measure.calibration import measure as measuring
from tightfit.backends.pytorch.measure.calibration import timing
from tightfit.backends.pytorch.measure.calibration.measure import CASES, families_of
from tightfit.calibration import FAMILIES, family_of, load, save
from tightfit.trace import Phase

SIZES = (8, 16)


@pytest.fixture
def quick(monkeypatch):
    for name, value in {"MATMUL_SIZES": SIZES, "BATCH_SIZES": SIZES, "RESULT_BYTES": (1 << 10, 1 << 14),
                        "LENGTHS": (8, 32), "HEADS": (8, 16), "ATTENTION_ELEMENTS": 1 << 10}.items():
        monkeypatch.setattr(measuring, name, {"cpu": value})
    monkeypatch.setattr(timing, "ROUND_SECONDS", {"cpu": 1e-5})
    monkeypatch.setattr(timing, "STEPS", 12)


def test_everything_that_planning_asks_for_is_measured(quick, tmp_path):
    random, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    told = []
    found = measuring.measure(torch.device("cpu"), lambda what, share: told.append((what, share)))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_float32_matmul_precision() == precision
    assert (found.device, found.kind, found.threads) == ("CPU", "cpu", torch.get_num_threads())
    assert (found.processor, found.torch) == (calibration.processor(), torch.__version__.partition("+")[0])
    for grids in (found.matmuls, found.batched_matmuls):
        assert set(grids) == {"float32", "float16", "bfloat16"}
        assert {grid.sizes for grid in grids.values()} == {SIZES}
    assert set(found.attention) == {f"{direction} {head}" for direction in ("forward", "backward") for head in (8, 16)}
    assert set(found.memory) == set(FAMILIES)
    for family, curves in found.memory.items():
        assert set(curves) == {"float32", "bfloat16"}, family
        for curve in curves.values():
            assert list(curve.values) == sorted(curve.values)
    assert set(found.host) == {"forward", "recompute", "backward", "optimizer"}
    assert min(found.host.values()) >= 0
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    save(found, tmp_path)
    assert load("CPU", tmp_path, threads=found.threads) == found


@pytest.mark.parametrize("family", CASES)
def test_a_familys_case_runs_an_op_of_that_family(family):
    x, y = torch.rand(2048) + 0.5, torch.rand(2048) + 0.5
    with torch.no_grad():
        ran = {family_of(op.name) for op in timing.ops_of(CASES[family](x, y))}
    assert family in ran


def test_every_family_has_a_case():
    assert set(CASES) == set(FAMILIES)


def test_a_call_that_would_take_too_long_is_not_made(quick, monkeypatch):
    monkeypatch.setattr(measuring, "LONGEST_CALL", {"cpu": 0.0})
    made = []

    def layouts(device, dtype, batch, m, n, k):
        made.append((m, n, k))
        return lambda: None

    monkeypatch.setattr(measuring, "_three_layouts", layouts)
    monkeypatch.setattr(measuring, "seconds", lambda call, device: 1.0)
    grid = measuring._matmuls(torch.device("cpu"), torch.float32, (8, 16), 1)
    assert made == [(8, 8, 8)]
    rates = [rate for plane in grid.rates for row in plane for rate in row]
    assert rates == pytest.approx([3 * 2 * 8**3] * 8)


def test_only_one_threads_own_time_leaves_out_what_else_runs(monkeypatch):
    for threads, clock in ((1, time.thread_time), (2, time.perf_counter)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert timing.host_clock() is clock
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(timing, "POSIX", False)  # where it goes on in steps of 16 ms
    assert timing.host_clock() is time.perf_counter


@pytest.mark.parametrize(("name", "alone"), [("NVIDIA H100 80GB HBM3", True), ("NVIDIA GeForce GTX 999", False)])
def test_of_a_gpu_of_the_catalogue_additions_tell_the_bandwidth(monkeypatch, name, alone):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert families_of(torch.device("cuda")) == (("add",) if alone else tuple(CASES))
    assert families_of(torch.device("cpu")) == tuple(CASES)


def test_recomputed_ops_are_told_from_the_backward_pass():
    step = timing.TinyStep(torch.device("cpu"))
    step.forward()
    assert not any(op.phase is Phase.RECOMPUTE for op in timing.ops_of(step.backward))
    step.recompute()
    step.forward()
    again = [op.name for op in timing.ops_of(step.backward) if op.phase is Phase.RECOMPUTE]
    assert sum("native_layer_norm.default" in name for name in again) == 2 * timing.LAYERS

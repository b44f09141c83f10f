"""The stopwatch: what it times, and that its memory is what a profile of the same step says."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from tests.built import built, global_batches_of
from tightfit.backends import load_backend
from tightfit.backends.measuring import measure
from tightfit.backends.pytorch.measure.meter import Meter, live_bytes

pytestmark = pytest.mark.usefixtures("few_objects")

CPU = torch.device("cpu")
TINY = {"model": "gpt2", "model_overrides": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256}, "seq_len": 32,
        "batch_size": 4, "micro_batch_size": 2, "data": "dummy", "device": "cpu"}  # fmt: skip


def test_steps_are_timed_end_to_end_after_warming_up() -> None:
    meter = Meter(CPU, warm_up=2, steps=3)
    meter.start()
    taken = 0
    while not meter.done:
        time.sleep(0.002)  # a wait for data, between two steps
        taken += 1
        meter.end(float(taken))
    found = meter.read()
    assert taken == meter.total == 6
    assert len(found.seconds) == 3
    assert min(found.seconds) >= 0.002
    assert found.losses == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


def test_memory_is_what_was_there_and_what_the_last_step_added() -> None:
    held = torch.zeros(1 << 20)
    meter = Meter(CPU, warm_up=0, steps=1)
    meter.start()
    meter.end(0.0)
    before = live_bytes()
    large = torch.zeros(3 << 20)
    del large
    meter.end(0.0)
    found = meter.read()
    assert before >= held.nbytes
    assert found.peak_allocated == found.peak_reserved == before + (12 << 20)


def test_tensors_that_share_memory_count_once_and_gradients_count() -> None:
    before = live_bytes()
    weight = torch.nn.Parameter(torch.zeros(1000))
    views = [weight.detach()[:10], weight.detach().view(10, 100)]
    assert live_bytes() - before == 4000
    weight.grad = torch.zeros(1000)
    assert live_bytes() - before == 8000
    assert len(views) == 2


@pytest.mark.parametrize("changes", [{}, {"checkpointing": "every-block"}, {"optimizer": "adamw-8bit"}])
def test_a_steps_peak_is_the_profiles(changes: dict[str, str]) -> None:
    backend, peaks = load_backend("pytorch"), []
    for way in ("time", "measure"):
        gc.collect()
        others = live_bytes()  # of tests that ran before in this process
        build = built({**TINY, **changes})
        step = backend.step(build)
        global_batches = step.global_batches(global_batches_of(build), 0, 16)
        if way == "time":
            timed = backend.time(step, global_batches, 1, 2)
            peaks.append(timed.peak_allocated - others)
            assert len(timed.losses) == 4
            assert len(timed.seconds) == 2
        else:
            peaks.append(measure(backend, step, global_batches).peak_bytes)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.002)

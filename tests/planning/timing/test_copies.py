"""Copies of a step: what they take and add, by hand; and the global batch that hides them, by predictions of others."""

from __future__ import annotations

import functools

import pytest

from tests.planning.ops import GPU
from tests.planning.timing.test_step_time import recipe
from tests.planning.timing.test_streams import compute, copy, trace
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.devices import find_device
from tightfit.planning.defaults import resolve
from tightfit.planning.timing.copies import HIDDEN_SPEED
from tightfit.planning.timing.link import LINK_SHARE
from tightfit.planning.timing.op_times import op_seconds
from tightfit.planning.timing.step_time import step_lanes, step_time
from tightfit.recipe import Recipe
from tightfit.trace import Phase, Stream

SIZE, WORK = 10**9, 85 * 10**9
IN, OUT = Stream.COPY_IN, Stream.COPY_OUT
COPIED, COMPUTED = SIZE / (GPU.pcie_bandwidth * LINK_SHARE), op_seconds(compute(0, WORK), GPU)
CARD = find_device("rtx-3060")


def test_copies_that_compute_hides_add_nothing():
    found = step_time(trace(compute(1, 2 * WORK), copy(2, SIZE, OUT, 1)), recipe(), GPU).copies
    assert (found.bytes_in, found.bytes_out, found.seconds_in) == (0, SIZE, 0.0)
    assert found.seconds_out == pytest.approx(COPIED)
    assert found.added == pytest.approx(0.0, abs=1e-9)
    assert (found.hidden, found.speed) == pytest.approx((1.0, 1.0))


def test_copies_that_compute_waits_for_add_what_they_take():
    found = step_time(trace(copy(1, SIZE, IN, 2), compute(2, WORK, 1)), recipe(), GPU).copies
    assert found.added == pytest.approx(COPIED, rel=0.01)
    assert found.hidden == pytest.approx(0.0, abs=0.01)
    assert found.speed == pytest.approx(COMPUTED / (COMPUTED + COPIED), rel=0.01)
    assert found.hidden_from is None  # of one micro-batch that cannot be told


def test_a_step_without_copies_has_none():
    assert step_time(trace(compute(1, WORK)), recipe(), GPU).copies is None


def test_lanes_say_when_each_stream_works():
    found = step_lanes(trace(copy(1, SIZE, IN, 2), compute(2, WORK, 1)), recipe(), GPU)
    lanes = {lane.stream: lane for lane in found if lane.phase is Phase.FORWARD}
    assert lanes[IN].end == pytest.approx(lanes[Stream.COMPUTE].begin)
    assert lanes[Stream.COMPUTE].end == pytest.approx(COPIED + COMPUTED, rel=0.01)
    assert lanes[IN].end - lanes[IN].begin == pytest.approx(COPIED)


@functools.cache
def streamed(micro_batches, **accumulation):
    """Copies and lanes of a streamed step of a model whose blocks are large and few."""
    asked = resolve(Recipe.from_dict({
        "model": "gpt2", "model_overrides": {"n_layer": 4, "n_head": 16, "n_embd": 2048, "n_positions": 1024},
        "vocab_size": 512, "seq_len": 1024, "micro_batch_size": 2, "batch_size": 2 * micro_batches, "compile": "off",
        "data": {"source": "dummy", "eval_fraction": 0}, "checkpointing": "every-block", "optimizer": "adamw",
        "precision": "bf16-pure", "attention": "sdpa", "loss": "plain", "update": "with-forward",
        "offload": {"name": "host", "activations": 1}, "accumulation": {"name": "by-block", **accumulation},
    }), CARD)
    predicted = PytorchBackend().predict(asked, CARD)
    return step_time(predicted, asked, CARD).copies, step_lanes(predicted, asked, CARD)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_the_global_batch_that_hides_copies_does_so_when_it_is_predicted_itself(micro_batches):
    small, _ = streamed(micro_batches)
    assert small.speed < HIDDEN_SPEED
    enough = -(-small.hidden_from // 2)
    assert enough > micro_batches
    assert streamed(enough)[0].speed == pytest.approx(HIDDEN_SPEED, abs=0.01)


def test_where_copies_grow_with_the_global_batch_none_hides_them():
    small, _ = streamed(4, sweep=2)
    assert small.speed < HIDDEN_SPEED
    assert small.hidden_from is None


def test_the_lanes_of_a_streamed_step_hold_its_copies():
    copies, lanes = streamed(4)
    busy = {stream: sum(lane.end - lane.begin for lane in lanes if lane.stream is stream) for stream in (IN, OUT)}
    assert busy[IN] == pytest.approx(copies.seconds_in, rel=0.05)
    assert busy[OUT] == pytest.approx(copies.seconds_out, rel=0.05)
    computing = max(lane.end for lane in lanes if lane.stream is Stream.COMPUTE)
    assert computing == pytest.approx(copies.step_seconds, rel=0.01)

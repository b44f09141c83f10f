"""Loops of which a few turns are followed: the trace is the one of all turns."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.plain import CPU, PLAIN
from tightfit import Recipe
from tightfit.backends.pytorch.follow.alike_turns import FEWEST_TURNS, alike_turns
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate import predict as prediction
from tightfit.devices import find_device

FIELDS = {
    **PLAIN, "loss": {"name": "chunked", "tokens": 8}, "data": "dummy", "pretrained": False, "model": "gpt2",
    "vocab_size": 96, "seq_len": 36, "batch_size": 4, "micro_batch_size": 2,
    "model_overrides": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64},
}
BY_BLOCK = {"accumulation": "by-block", "update": "with-forward", "checkpointing": "every-block", "offload": "host"}


@pytest.mark.parametrize("fields", [
    {}, {"precision": "bf16-pure"}, {"seq_len": 33}, {"data": {"source": "dummy", "eval_fraction": 0}}, BY_BLOCK,
    {"trainable": "lora"}, {"checkpointing": {"name": "tiled-mlp", "tokens": 8}},
    {"checkpointing": {"name": "tiled-mlp", "tokens": 9}, "precision": "bf16-pure"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("device", [CPU, find_device("h100-sxm")], ids=lambda device: device.kind)
def test_a_trace_of_few_chunks_is_that_of_all(fields, device, monkeypatch):
    if device is CPU and "offload" in fields:
        fields = {**fields, "offload": "none"}
    recipe, followed = Recipe.from_dict({**FIELDS, **fields}), []

    def every(tracker, items):
        return items

    def few(tracker, items):
        gone = 0
        for item in alike_turns(tracker, items):
            gone += 1
            yield item
        followed.append((gone, len(items)))

    monkeypatch.setattr(prediction, "alike_turns", few)
    quick = prediction.predict(recipe, device)
    monkeypatch.setattr(prediction, "alike_turns", every)
    whole = prediction.predict(recipe, device)
    assert followed
    assert all(gone == 4 < all_of_them for gone, all_of_them in followed)
    assert quick.ops == whole.ops
    assert quick.allocations == whole.allocations
    assert quick.spans == whole.spans


def gone_through(turn, count):
    """The turns that are gone through, and the trace of a loop that works so."""
    tracker, gone = Tracker(), []
    with tracker:
        for number in alike_turns(tracker, range(count)):
            gone.append(number)
            turn(number)
    return gone, tracker


@pytest.mark.parametrize("turn", [
    lambda kept, number: torch.ones(2 + number % 2),
    lambda kept, number: kept.append(torch.ones(2)),
    lambda kept, number: kept.extend(torch.ones(2) for _ in range(9)) if number == 0 else kept.pop(),
    lambda kept, number: torch.ones(2) + torch.ones(2) if number == 2 else None,
], ids=["sizes", "kept", "given back", "ops"])  # fmt: skip
def test_turns_that_are_not_alike_are_all_gone_through(turn):
    gone, _ = gone_through(partial(turn, []), 9)
    assert gone == [*range(9)]


def test_alike_turns_are_added_as_often_as_they_run():
    gone, tracker = gone_through(lambda number: torch.ones(4).add_(1), 9)
    assert gone == [0, 1, 2, 8]
    assert [op.name for op in tracker.ops] == ["aten.ones.default", "aten.add_.Tensor"] * 9
    ticks = [op.tick for op in tracker.ops]
    assert ticks == sorted(set(ticks))
    assert tracker.memory.tick >= ticks[-1]
    assert len({b - a for a, b in zip(ticks[::2], ticks[2::2], strict=False)}) == 1


def test_short_loops_are_gone_through():
    gone, _ = gone_through(lambda number: torch.ones(4), FEWEST_TURNS - 1)
    assert gone == [*range(FEWEST_TURNS - 1)]

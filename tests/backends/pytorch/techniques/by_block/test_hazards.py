"""Mistakes that a processor forgives and CUDA does not, looked for while steps stream: device memory that is given back
under a copy, and gradients bound to weights of another device."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.backends.pytorch.techniques.by_block.streaming_cases import (
    ALL,
    EVERYTHING,
    HALF,
    HOST,
    SWEEPS,
    run,
)
from tightfit.backends.pytorch.techniques.by_block import transfers
from tightfit.backends.pytorch.techniques.by_block.residence import Residence
from tightfit.backends.pytorch.techniques.by_block.transfers import Transfers
from tightfit.trace import Stream

EMBEDDINGS = {"name": "host", "embeddings": True}
RESIDENT_GRADIENTS = {"name": "host", "gradients": 0}
IN_BACKWARD = {"update": "in-backward", "max_grad_norm": 0}
CASES = {
    "everything": ("llama", EVERYTHING),
    "everything, sums in fp32": (
        "llama", {**EVERYTHING, "accumulation": {"name": "by-block", "sweep": 2, "gradient_sums": "fp32"}}),
    "tied embeddings, gradients stay": ("gpt2", {**HOST, "offload": {**EMBEDDINGS, "gradients": 0}}),
    "tied embeddings, sweeps": ("gpt2", {**SWEEPS, "offload": EMBEDDINGS}),
    "embeddings": ("llama", {**HOST, "offload": EMBEDDINGS}),
    "in-backward, sweeps, gradients stay": ("llama", {**SWEEPS, **IN_BACKWARD, "offload": RESIDENT_GRADIENTS}),
    "in-backward, sweeps": ("llama", {**SWEEPS, **IN_BACKWARD}),
    "in-backward, embeddings": ("llama", {**HOST, **IN_BACKWARD, "offload": EMBEDDINGS}),
    "after-backward": ("llama", {**ALL, "update": "after-backward"}),
    "all": ("llama", ALL), "half": ("llama", HALF), "t5": ("t5", HOST), "t5, in-backward": ("t5", {**HOST, **IN_BACKWARD}),
    "albert": ("albert", SWEEPS),
}


class Watched(Transfers):
    """Transfers that note device memory which dies before the copy that uses it was waited for. Copies out that hold on
    to their source cannot."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made, self.over = {stream: 0 for stream in Stream}, {stream: 0 for stream in Stream}
        self.freed = []

    def _copy(self, stream, source, target, after, keep):
        copy = super()._copy(stream, source, target, after, keep)
        self.made[stream] += 1
        copy.number = number = self.made[stream]
        if stream is Stream.COPY_IN or not keep:
            memory = (source if stream is Stream.COPY_OUT else target).untyped_storage()
            end = weakref.finalize(memory, lambda: number > self.over[stream] and self.freed.append((stream, number)))
            end.atexit = False
        return copy

    def finish(self, copy):
        self.over[copy.stream] = max(self.over[copy.stream], copy.number)  # a stream keeps its order
        super().finish(copy)


@pytest.fixture
def watched(monkeypatch):
    """The transfers made, and the parameters that got a gradient while they waited in host memory."""
    made, away, misplaced = [], set(), []
    bind, gradient = Residence._bind_weights, torch.Tensor.grad

    def bound(self, part, tensors):
        bind(self, part, tensors)
        (away.update if tensors is None else away.difference_update)(self.parts.parameters[part])

    def set_gradient(parameter, value):
        if value is not None and parameter in away:
            misplaced.append(tuple(parameter.shape))
        gradient.__set__(parameter, value)

    monkeypatch.setattr(transfers, "Transfers", lambda *args, **kwargs: made.append(Watched(*args, **kwargs)) or made[-1])
    monkeypatch.setattr(Residence, "_bind_weights", bound)
    monkeypatch.setattr(torch.nn.Parameter, "grad", property(
        gradient.__get__, set_gradient, gradient.__delete__), raising=False)
    return made, misplaced


@pytest.mark.parametrize(("architecture", "fields"), CASES.values(), ids=CASES)
def test_memory_outlives_its_copies_and_gradients_lie_beside_their_weights(architecture, fields, watched):
    made, misplaced = watched
    run(architecture, **fields)

    (watch,) = made
    assert watch.made[Stream.COPY_IN] > 0
    assert watch.freed == []
    assert misplaced == []


def test_memory_that_is_freed_under_a_copy_is_seen(watched):
    watch = Watched(torch.device("cpu"))
    copy = watch.to_device(torch.ones(8))
    del copy.target
    assert watch.freed == [(Stream.COPY_IN, 1)]

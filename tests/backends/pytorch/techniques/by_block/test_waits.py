"""Every wait of a streamed step: CUDA's order of streams holds with all of them, and without any one it does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.backends.pytorch.techniques.by_block.missing_waits import mutants
from tests.backends.pytorch.techniques.by_block.stream_order import Unordered, stream_order
from tests.backends.pytorch.techniques.by_block.streaming_cases import (
    ALL,
    EVERYTHING,
    FROZEN,
    HALF,
    HOST,
    LOOPED,
    SWEEPS,
    UPWARD,
    global_batches,
    learn_late,
    leave_a_block_out,
    run,
    step_of,
)
from tightfit.backends.pytorch.techniques.by_block import (
    activations,
    offloaded_state,
    streamed_tensors,
    transfers,
    update,
)
from tightfit.backends.pytorch.techniques.by_block.activations import HostActivations
from tightfit.backends.pytorch.techniques.by_block.streamed_tensors import ALIGNMENT, StreamedTensors
from tightfit.trace import Category

EMBEDDINGS = {"name": "host", "embeddings": True}
IN_BACKWARD = {"update": "in-backward", "max_grad_norm": 0}


CPU = torch.device("cpu")
SMALLEST = 1024
"""Bytes of a tensor that is worth a copy."""


def offload(**fields):
    return {"offload": {"name": "host", **fields}}


def resumed():
    """Two runs, one that goes on from the other's checkpoint, and is evaluated."""
    first, second = (step_of("llama", **HOST) for _ in range(2))
    (batch,) = global_batches("llama", 1)
    first(batch, 1e-3)
    with TemporaryDirectory() as folder:
        second.load(Path(folder), first.save(Path(folder)))
    second(batch, 1e-3)
    second.evaluate([batch])
    second.build.model.load_state_dict(first.build.model.state_dict())
    second(batch, 1e-3)
    second.update.flush()


def states_are_made_and_written():
    """By the host, as a checkpoint's are."""
    step = step_of("llama", **HOST)
    step.update.make_states()
    for state in step.optimizer.state.values():
        for value in state.values():
            value.zero_()


def brought_for_nothing():
    """A backward pass that is expected, and never asked for."""
    block, x = torch.nn.Identity(), torch.rand(SMALLEST, requires_grad=True)
    kept = HostActivations(transfers.Transfers(CPU), [block], 1)
    output = kept.run(0, lambda: x.exp().exp())
    kept.expect([0])
    kept._wait_for_offloads()
    del output


def a_larger_part_comes():
    """To a place that is copied from."""
    kind = StreamedTensors(transfers.Transfers(CPU), [torch.nn.Identity()] * 3, Category.GRADIENTS, lambda *_: None, 3)
    kind.offload(0, [torch.rand(ALIGNMENT)])
    kind.wait_for_offload(0)
    kind.fetch(0)
    kind.write_back(0)
    kind.release(0)
    kind.offload(2, [torch.rand(2 * ALIGNMENT)])
    kind.fetch(2)
    kind.release(2)
    kind.wait_for_offload(2)


GRADIENTS = offload(weights=0, optimizer=0)
CASES = {
    "everything": ("llama", EVERYTHING),
    "learned late": ("llama", {**HOST, "before": learn_late}),
    "two blocks": ("llama", {**SWEEPS, "blocks": 2}),
    "a block is left out": ("llama", {**HOST, **GRADIENTS, "before": leave_a_block_out}),
    "tied embeddings, sweeps": ("gpt2", {**SWEEPS, **offload(embeddings=True)}),
    "embeddings": ("llama", {**HOST, **offload(embeddings=True)}),
    "after-backward": ("llama", {**ALL, "update": "after-backward"}),
    "tied embeddings, gradients stay": ("gpt2", {**HOST, **offload(embeddings=True, gradients=0)}),
    "sums in fp32": (
        "llama", {**EVERYTHING, "accumulation": {"name": "by-block", "sweep": 2, "gradient_sums": "fp32"}}),
    "in-backward, sweeps, gradients stay": ("llama", {**SWEEPS, **IN_BACKWARD, **offload(gradients=0)}),
    "in-backward, sweeps": ("llama", {**SWEEPS, **IN_BACKWARD}),
    "in-backward, embeddings": ("llama", {**HOST, **IN_BACKWARD, **offload(embeddings=True)}),
    "all": ("llama", ALL), "half": ("llama", HALF), "looped": ("llama", LOOPED), "t5": ("t5", HOST),
    "t5, in-backward": ("t5", {**HOST, **IN_BACKWARD}), "albert": ("albert", SWEEPS),
    "weights": ("llama", {**HOST, **offload(gradients=0, optimizer=0)}),
    "frozen": ("llama", {**EVERYTHING, **FROZEN["lora"], "base": "nf4"}),
    "upward": ("llama", {**UPWARD, **FROZEN["dora"]}),
    "some layers": ("llama", {**UPWARD, **FROZEN["layers"], "update": "after-backward"}),
    "one micro-batch a sweep": ("llama", {**ALL, "accumulation": {"name": "by-block", "sweep": 1}}),
}
SCENARIOS: dict[str, Callable[[], object]] = {
    "brought for nothing": brought_for_nothing, "a larger part comes": a_larger_part_comes,
    "states are made": states_are_made_and_written,
    "resumed": resumed,
    **{name: partial(run, architecture, 2, **fields) for name, (architecture, fields) in CASES.items()},
}


@pytest.fixture(autouse=True)
def few_tensors_are_worth_a_copy(monkeypatch):
    monkeypatch.setattr(activations, "SMALLEST_COPY", SMALLEST)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_memory_is_used_in_the_order_of_its_copies(scenario):
    with stream_order() as order:
        scenario()

    assert order.copies > 0


MODULES = (transfers, streamed_tensors, offloaded_state, activations, update)


@pytest.mark.cold
@pytest.mark.parametrize("mutant", [mutant for module in MODULES for mutant in mutants(module)], ids=str)
def test_every_wait_is_needed(mutant, monkeypatch):
    monkeypatch.setattr(mutant.function, "__code__", mutant.code)
    with pytest.raises(Unordered):
        run_all()


def run_all():
    for scenario in SCENARIOS.values():
        with stream_order():
            scenario()

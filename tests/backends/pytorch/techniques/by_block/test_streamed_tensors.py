"""Copies at other times than the processor's own: as late as their waits allow, with NaN in their targets until then.

Those of a processor are as early as they can be: both give the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.backends.pytorch.techniques.by_block.streaming_cases import (
    ALL,
    EVERYTHING,
    FROZEN,
    HALF,
    HOST,
    LOOPED,
    SWEEPS,
    UPWARD,
    run,
    same,
)
from tightfit.backends.pytorch.techniques.by_block import block_calls
from tightfit.backends.pytorch.techniques.by_block.block_calls import BlockCalls
from tightfit.backends.pytorch.techniques.by_block.parts import Parts
from tightfit.backends.pytorch.techniques.by_block.streamed_tensors import ALIGNMENT
from tightfit.backends.pytorch.techniques.by_block.transfers import Copy, StreamEvent, Transfers

POISON = 0xFF
"""Every byte of a target before its copy: NaN in each floating-point format that lies there."""


class LateTransfers(Transfers):
    """Copies that run when something waits for them, and no earlier; in order on each stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queue: dict[Copy, torch.Tensor] = {}

    def _run(self, copy: Copy, source: torch.Tensor, after: Sequence[StreamEvent]) -> None:
        for point in after:  # the target is free then, and no sooner
            if isinstance(point, Copy):
                self.finish(point)
        copy.target.fill_(torch.nan if copy.target.is_floating_point() else POISON)
        self.queue[copy] = source

    def finish(self, copy: Copy) -> None:
        while copy in self.queue:
            first = next(queued for queued in self.queue if queued.stream is copy.stream)
            first.target.copy_(self.queue.pop(first))
        super().finish(copy)


@pytest.mark.parametrize("fields", [HOST, SWEEPS, HALF, ALL, EVERYTHING, LOOPED],
                         ids=["host", "sweeps", "half", "all", "everything", "looped"])
@pytest.mark.parametrize("changes", [{}, {"checkpointing": "every-block"}, {"optimizer": "adamw-8bit"}], ids=str)
def test_late_copies_change_no_bit(fields, changes, monkeypatch):
    plain = run("llama", **changes)
    monkeypatch.setattr(block_calls, "Transfers", LateTransfers)

    assert same(plain, run("llama", **changes, **fields))


@pytest.mark.parametrize("fields", [HOST, UPWARD, HALF, EVERYTHING], ids=["host", "upward", "half", "everything"])
@pytest.mark.parametrize("frozen", [
    {**FROZEN["lora"], "base": "nf4"}, {**FROZEN["dora"], "checkpointing": "every-block"}, FROZEN["layers"]],
    ids=["lora", "dora", "layers"])
def test_late_copies_of_frozen_weights_change_no_bit(fields, frozen, monkeypatch):
    plain = run("llama", **frozen)
    monkeypatch.setattr(block_calls, "Transfers", LateTransfers)

    assert same(plain, run("llama", **frozen, **fields))


def test_host_memory_is_what_parts_need():
    resident = run("llama", **HOST).step.update._offloaded
    streamed_ends = run("llama", **EVERYTHING).step.update._offloaded
    sizes = [sum(-(-p.numel() * p.element_size() // ALIGNMENT) * ALIGNMENT for p in parameters)
             for parameters in resident.parts.parameters]
    blocks, streams, every = sum(sizes[: len(resident.parts.blocks)]), sum(sizes[:-1]), sum(sizes)

    def host_bytes(offloaded):
        return [sum(host_copy.memory.numel() for host_copy in kind._host_copies.values())
                for kind in (offloaded._weights, offloaded._gradients, offloaded._states)]

    assert host_bytes(resident) == [blocks, blocks, 2 * every]
    assert host_bytes(streamed_ends) == [streams, streams, 2 * every]


def test_what_blocks_share_is_no_blocks_own():
    shared = torch.nn.Linear(2, 2)
    blocks = [torch.nn.Sequential(torch.nn.Linear(2, 2), shared) for _ in range(2)]

    assert [len(own) for own in Parts(torch.nn.Sequential(*blocks), blocks).parameters] == [2, 2, 2]


def test_an_embedding_takes_ids_from_where_its_weights_wait():
    """Llama 4 sends them to the device of its embedding's weight."""
    embedding, device = torch.nn.Embedding(8, 4), torch.device("meta")
    parts = Parts(torch.nn.Module(), [])
    parts.end_modules = {0: [embedding]}
    parts.modules = [embedding]
    calls = BlockCalls(parts, Transfers(device), embeddings=True)
    calls.update = Mock()
    embedding.to(device)

    assert embedding(torch.arange(3)).device == device
    calls.close()
    assert embedding._compiled_call_impl is None

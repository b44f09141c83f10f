"""Global batches of the right shapes and no values: all that a step on fake tensors reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.backends.pytorch.batch import TensorBatch, TensorGlobalBatch
from tightfit.backends.pytorch.build import Build
from tightfit.recipe import Recipe
from tightfit.tasks import DOCUMENTS_A_ROW, Task

Placed = Callable[[Tensor], None]
"""Told of each tensor that reaches the device."""


@dataclass(frozen=True)
class FakeBatch:
    """A micro-batch on the host, which becomes tensors as it reaches the device."""

    build: Build
    samples: int
    placed: Placed

    def to(self, device: torch.device) -> TensorBatch:
        recipe, task = self.build.recipe, self.build.task
        random = recipe.data.source == "dummy"
        packed = recipe.data.shares_rows(task)
        length = recipe.seq_len if packed or random else padded_length(recipe)
        spec = task.batch_spec(self.samples, length, self.build.facts, packed)
        tokens, starts = (self.samples, length), self.samples * DOCUMENTS_A_ROW + 1
        padded = is_padded(recipe, task)
        batch = TensorBatch(
            inputs={name: torch.empty(s.shape, dtype=getattr(torch, s.dtype)) for name, s in spec.inputs.items()},
            labels=torch.empty(spec.labels.shape, dtype=torch.int64),
            mask="padded" if padded else spec.mask,
            padding=torch.empty(tokens, dtype=torch.bool) if padded else None,
            document_ids=torch.empty(tokens, dtype=torch.int32) if packed else None,
            document_starts=torch.empty(starts, dtype=torch.int32) if packed else None,
        )
        batch.map(self._place)
        return batch

    def _place(self, tensor: Tensor) -> Tensor:
        self.placed(tensor)
        return tensor


def is_padded(recipe: Recipe, task: Task) -> bool:
    """Whether a micro-batch's rows end in padding: documents of their own length, where padding differs from text."""
    packed = task.packs and recipe.data.packing
    return recipe.data.source != "dummy" and not packed and task.reads == "tokens" and task.predicts != "next"


def padded_length(recipe: Recipe) -> int:
    """Tokens in the longest row of documents that are padded."""
    multiple = recipe.pad_sequence_to or 1
    return math.ceil(recipe.seq_len / multiple) * multiple


def micro_batch_sizes(recipe: Recipe) -> list[int]:
    """Samples in each micro-batch of a full global batch."""
    micro, full, rest = _split(recipe)
    return [micro] * full + [rest] * bool(rest)


def micro_batch_groups(recipe: Recipe, ends_apart: bool = False) -> list[tuple[int, int]]:
    """A full global batch's micro-batches by size, each with how often it runs in a row, or the sweep that it is in.

    The first one finds no gradients; those behind it add to some, all alike but for the last one's size. Of sweeps the
    last one ends the step as well. ends_apart: the last one does more than those before, and stands alone.
    """
    micro, full, rest = _split(recipe)
    if recipe.accumulation == "auto" or not recipe.accumulation.by_block:
        last = int(ends_apart and not rest and full > 1)
        groups = ((micro, 1), (micro, full - 1 - last), (micro, last), (rest, 1))
        return [(size, times) for size, times in groups if size and times]
    count = full + bool(rest)
    each = recipe.accumulation.sweep_of(count)
    sweeps = -(-count // each)
    if sweeps <= 3:
        return [(size, 1) for size in micro_batch_sizes(recipe)]
    last = count - each * (sweeps - 1) - bool(rest)
    return [(micro, 1)] * each + [(micro, sweeps - 2)] * each + [(micro, 1)] * last + [(rest, 1)] * bool(rest)


def _split(recipe: Recipe) -> tuple[int, int, int]:
    """Samples of a micro-batch, how many such a global batch has, and samples of a smaller last one."""
    micro = recipe.resolved_micro_batch
    return micro, *divmod(recipe.batch_size, micro)


def fake_global_batch(build: Build, sizes: list[int], placed: Placed) -> TensorGlobalBatch:
    """A global batch whose micro-batches hold `sizes` samples."""
    samples = sum(sizes)
    batches = tuple(FakeBatch(build, size, placed) for size in sizes)
    tokens = samples * build.recipe.seq_len
    return TensorGlobalBatch(micro_batches=batches, count=tokens, samples=samples, tokens=tokens, origin="planned")  # type: ignore[arg-type]

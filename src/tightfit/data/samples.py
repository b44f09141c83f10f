"""Samples: what a loader draws micro-batches from, by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tightfit.models import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, Array, MicroBatch, get_task

PADDED_WITH_ZERO = frozenset({"token_type_ids"})
"""Inputs whose padding is 0; other inputs of ids are padded with the model's padding token."""


class Samples(Protocol):
    """A fixed number of samples. It must survive pickling to a worker process, cheaply."""

    def __len__(self) -> int:
        """Number of samples."""

    def batch(self, indices: Array, epoch: int) -> tuple[MicroBatch, int]:
        """The micro-batch of the samples `indices` (int64, 1-d) as seen in `epoch`, and its number of real tokens
        (images: of images). A pure function of its arguments."""

    def numbers(self, indices: Array) -> Array:
        """The numbers that the samples `indices` have in the data, for messages: int64 (indices,)."""


@dataclass(frozen=True)
class Example:
    """One sample: inputs without a batch dimension, and labels, a class (0-d) or one for each position (1-d)."""

    inputs: dict[str, Array]
    labels: Array


class Examples(Protocol):
    """Samples that are made one at a time."""

    def __len__(self) -> int:
        """Number of samples."""

    def example(self, index: int, epoch: int) -> Example:
        """The sample `index` as seen in `epoch`. A pure function of its arguments."""


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Samples of one example a row, padded on the right to the longest of the micro-batch.

    pad_id: the model's padding token. multiple: rows are rounded up to a multiple of this. causal: nothing looks back
    at padding, so the micro-batch needs no mask. chosen: which of the examples these are, int64 (samples,); None for
    all of them.
    """

    examples: Examples
    pad_id: int
    multiple: int = 1
    causal: bool = False
    chosen: Array | None = None

    def __len__(self) -> int:
        return len(self.examples) if self.chosen is None else len(self.chosen)

    def numbers(self, indices: Array) -> Array:
        return indices if self.chosen is None else self.chosen[indices]

    def batch(self, indices: Array, epoch: int) -> tuple[MicroBatch, int]:
        rows = [self.examples.example(int(i), epoch) for i in self.numbers(indices)]
        if "input_ids" not in rows[0].inputs:
            stacked = {name: np.stack([r.inputs[name] for r in rows]) for name in rows[0].inputs}
            return MicroBatch(inputs=stacked, labels=np.stack([r.labels for r in rows])), len(rows)
        inputs = {
            name: self._pad([r.inputs[name] for r in rows], 0 if name in PADDED_WITH_ZERO else self.pad_id)
            for name in rows[0].inputs
        }
        one_each = rows[0].labels.ndim == 0
        labels = np.stack([r.labels for r in rows]) if one_each else self._pad([r.labels for r in rows], IGNORE)
        lengths = np.array([len(r.inputs["input_ids"]) for r in rows])
        padding = np.arange(inputs["input_ids"].shape[1]) < lengths[:, None]
        tokens = int(lengths.sum())
        if self.causal or padding.all():
            return MicroBatch(inputs=inputs, labels=labels), tokens
        return MicroBatch(inputs=inputs, labels=labels, mask="padded", padding=padding), tokens

    def _pad(self, rows: Sequence[Array], value: int) -> Array:
        longest = max(len(row) for row in rows)
        result = np.full((len(rows), -(-longest // self.multiple) * self.multiple), value, dtype=np.int64)
        for place, row in zip(result, rows, strict=True):
            place[: len(row)] = row
        return result


def padded(examples: Examples, recipe: Recipe, facts: ModelFacts) -> Padded:
    """Examples of the recipe's task as samples, padded as its model and the recipe want it."""
    causal = get_task(recipe.task).predicts == "next"
    return Padded(examples=examples, pad_id=facts.pad_token_id, multiple=recipe.pad_sequence_to or 1, causal=causal)


def next_tokens(ids: Array, length: int) -> Example:
    """The causal-lm example of a document: its first `length` tokens, each labelled with the one behind it."""
    labels = np.full(min(len(ids), length), IGNORE, dtype=np.int64)
    following = ids[1 : length + 1]
    labels[: len(following)] = following
    return Example({"input_ids": ids[:length]}, labels)


def shifted_right(labels: Array, start_id: int, pad_id: int) -> Array:
    """Decoder inputs that predict `labels`: `start_id`, then the labels without the last."""
    shifted = np.concatenate((np.array([start_id], dtype=np.int64), labels[:-1]))
    return np.where(shifted == IGNORE, pad_id, shifted)

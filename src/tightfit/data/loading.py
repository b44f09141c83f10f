"""Loader of global batches: each a pure function of its index, so that data goes on exactly where it stopped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from tightfit.data.samples import Packed, Samples, generator
from tightfit.errors import DataError
from tightfit.recipe import Recipe
from tightfit.recipe.sections import GIVEN_ROWS
from tightfit.tasks import IGNORE, TASKS, Array, GlobalBatch, MicroBatch, global_batch_of

ORDER_STREAM = 0x0D4E
"""Keeps the order's random numbers apart from those of a sample."""

NAMED_SAMPLES = 8
"""A global batch's origin names so many of its samples."""

WHOLE = (0, 1)
"""The part of a global batch that one process alone has."""


class GlobalBatchLoader:
    """Global batches, endlessly: `global_batch(k)` is a pure function of `k`, the samples and the recipe.

    Each epoch shows every sample once, in an order that depends on the seed and the epoch alone; its last global batch
    is smaller where the samples do not divide evenly. Pickles cheaply.
    """

    def __init__(self, samples: Samples, recipe: Recipe, drop_last: bool = False) -> None:
        """`recipe.micro_batch_size` must be resolved. drop_last: leave smaller global batches out. Raises DataError for
        fewer tokens than a packed sample has, and fewer samples than a global batch."""
        if isinstance(samples, Packed) and (tokens := len(samples.stream)) < recipe.seq_len:
            raise DataError(f"seq_len: {recipe.data.source} has {tokens:,} training tokens, fewer than one sequence of "
                            f"{recipe.seq_len:,}; write seq_len={tokens} or less, or more data")
        if len(samples) < recipe.batch_size:
            packed, instead = "", "or more data"
            if isinstance(samples, Packed):
                packed = f" of {recipe.seq_len:,} tokens, into which documents are packed,"
                instead = "data.packing=false for a sample a document, or more data"
            elif TASKS[recipe.task].packs and recipe.data.source not in (GIVEN_ROWS, "dummy"):
                instead = "data.packing=true for several samples of a long document, or more data"
            are = "sample{} is" if len(samples) == 1 else "samples{} are"
            raise DataError(
                f"batch_size: {len(samples):,} training {are.format(packed)} fewer than one global batch of "
                f"{recipe.batch_size:,}; write batch_size={max(len(samples), 1)} or less, {instead}"
            )
        self.samples = samples
        self.batch_size = recipe.batch_size
        self.micro_batch_size = recipe.resolved_micro_batch
        self.seed = recipe.seed
        self.drop_last = drop_last
        self._order: tuple[int, Array] | None = None
        self._part = WHOLE

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}

    def __len__(self) -> int:
        """Global batches in an epoch."""
        whole, rest = divmod(len(self.samples), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def require_labels(self) -> None:
        """Raises DataError where no label of any sample counts. Looks no further than to the first that does."""
        if any(self.global_batch(index).count for index in range(len(self))):
            return
        raise DataError(
            f"data: every label of the {len(self.samples):,} training samples is {IGNORE}, which does not count, so "
            "that there is nothing to learn; write the labels of what is to be learned, or a larger seq_len where it "
            "lies behind what fits"
        )

    def global_batch(self, index: int) -> GlobalBatch:
        chosen, epoch = self.chosen(index)
        origin = f"epoch {epoch}, samples {_numbers(self.samples, chosen)}"
        return make_global_batch(self.samples, chosen, self.micro_batch_size, epoch, origin, self._part)

    def shard(self, rank: int, of: int) -> GlobalBatchLoader:
        found = copy(self)
        found._part = (rank, of)
        return found

    def is_whole(self, index: int) -> bool:
        """Whether the global batch of that index has `batch_size` samples, unlike the last of some epochs."""
        return self.drop_last or (index + 1) % len(self) != 0 or len(self.samples) % self.batch_size == 0

    def chosen(self, index: int) -> tuple[Array, int]:
        """The samples of the global batch of that index, in order, and the epoch that shows them."""
        epoch, place = divmod(index, len(self))
        start = place * self.batch_size
        return self._epoch_order(epoch)[start : start + self.batch_size], epoch

    def _epoch_order(self, epoch: int) -> Array:
        """The permutation of an epoch, int64 (samples,); that of the epoch last asked for is kept."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, generator(self.seed, epoch, ORDER_STREAM).permutation(len(self.samples)))
        return self._order[1]


def evaluation_global_batches(
    samples: Samples, recipe: Recipe, part: tuple[int, int] = WHOLE
) -> Iterator[GlobalBatch]:
    """Global batches over at most `eval_samples` samples, evenly spread and in order; the same each time. part: as of
    `make_global_batch`."""
    size, micro = recipe.batch_size, recipe.resolved_micro_batch
    total = min(len(samples), recipe.eval_samples or len(samples))
    spread = np.arange(total) * len(samples) // max(total, 1)
    for start in range(0, total, size):
        chosen = spread[start : start + size]
        yield make_global_batch(samples, chosen, micro, 0, f"held-out samples {_numbers(samples, chosen)}", part)


def make_global_batch(
    samples: Samples, chosen: Array, micro_batch_size: int, epoch: int, origin: str, part: tuple[int, int] = WHOLE
) -> GlobalBatch:
    """The samples `chosen` as one global batch; its last micro-batch may be smaller.

    part: this process's number and how many share the samples, each a run of them, of equal lengths up to one. All
    parts have as many micro-batches, for processes exchange something in each: one of padding alone makes up
    for a part's lack.
    """
    rank, of = part
    shares = np.array_split(chosen, of)  # the first is one of the longest
    own, passes = shares[rank], math.ceil(len(shares[0]) / micro_batch_size)
    starts = range(0, len(own), micro_batch_size)
    batches = tuple(samples.batch(own[start : start + micro_batch_size], epoch) for start in starts)
    counted = global_batch_of(batches, origin)
    if len(batches) == passes:
        return counted
    return replace(counted, micro_batches=(*batches, _as_padding(samples.batch(chosen[:1], epoch))))


def _as_padding(batch: MicroBatch) -> MicroBatch:
    """The micro-batch with nothing in it that counts."""
    ids = batch.inputs.get("input_ids")
    mask = "none" if batch.mask == "padded" else batch.mask  # a token that may see none would have no numbers
    return replace(batch, labels=np.full_like(batch.labels, IGNORE), mask=mask,
                   padding=None if ids is None else np.zeros(ids.shape, bool))


def _numbers(samples: Samples, chosen: Array) -> str:
    """The first of the samples `chosen`, by their numbers in the data: `7, 31, 4, ... (64 in all)`."""
    named = ", ".join(str(number) for number in samples.numbers(chosen[:NAMED_SAMPLES]))
    return named if len(chosen) <= NAMED_SAMPLES else f"{named}, ... ({len(chosen)} in all)"

"""From a global batch's index to its micro-batches: the order of the data, exactly resumable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tightfit.data.samples import Samples, generator
from tightfit.errors import DataError
from tightfit.recipe import Recipe
from tightfit.tasks import Array, GlobalBatch, MicroBatch, global_batch_of

ORDER = 0x0D4E
"""Keeps the order's random numbers apart from those of a sample."""

NAMED = 8
"""A global batch's origin names so many of its samples."""


class GlobalBatchLoader:
    """Global batches, endlessly: `global_batch(k)` is a pure function of `k`, the samples and the recipe.

    Each epoch shows every sample once, in an order that depends on the seed and the epoch alone; its last global batch
    is smaller where the samples do not divide evenly. Pickles cheaply.
    """

    def __init__(self, samples: Samples, recipe: Recipe) -> None:
        """`recipe.micro_batch_size` must be resolved. Raises DataError for fewer samples than a global batch."""
        assert recipe.micro_batch_size != "auto"
        if len(samples) < recipe.batch_size:
            kind = "sample is" if len(samples) == 1 else "samples are"
            raise DataError(
                f"batch_size: {len(samples):,} training {kind} fewer than one global batch of {recipe.batch_size:,}; "
                f"write batch_size={max(len(samples), 1)} or less, or more data"
            )
        self.samples = samples
        self.batch_size = recipe.batch_size
        self.micro_batch_size = recipe.micro_batch_size
        self.seed = recipe.seed
        self._order: tuple[int, Array] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}

    def __len__(self) -> int:
        """Global batches in an epoch."""
        return (len(self.samples) + self.batch_size - 1) // self.batch_size

    def global_batch(self, index: int) -> GlobalBatch:
        """The global batch of that index, counted from the run's beginning."""
        chosen, epoch = self.chosen(index)
        origin = f"epoch {epoch}, samples {_numbers(self.samples, chosen)}"
        return make_global_batch(self.samples, chosen, self.micro_batch_size, epoch, origin)

    def chosen(self, index: int) -> tuple[Array, int]:
        """The samples of the global batch of that index, in order, and the epoch that shows them."""
        epoch, place = divmod(index, len(self))
        start = place * self.batch_size
        return self._epoch_order(epoch)[start : start + self.batch_size], epoch

    def _epoch_order(self, epoch: int) -> Array:
        """The permutation of an epoch, int64 (samples,); that of the epoch last asked for is kept."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, generator(self.seed, epoch, ORDER).permutation(len(self.samples)))
        return self._order[1]


def evaluation_global_batches(samples: Samples, recipe: Recipe) -> Iterator[GlobalBatch]:
    """Global batches over at most `eval_samples` samples, evenly spread and in order; the same each time."""
    size, micro = recipe.batch_size, recipe.micro_batch_size
    assert micro != "auto"
    total = min(len(samples), recipe.eval_samples)
    spread = np.arange(total) * len(samples) // max(total, 1)
    for start in range(0, total, size):
        chosen = spread[start : start + size]
        yield make_global_batch(samples, chosen, micro, 0, f"held-out samples {_numbers(samples, chosen)}")


def make_global_batch(samples: Samples, chosen: Array, micro_batch_size: int, epoch: int, origin: str) -> GlobalBatch:
    """The samples `chosen` as one global batch; its last micro-batch may be smaller."""
    batches: list[MicroBatch] = []
    tokens = 0
    for start in range(0, len(chosen), micro_batch_size):
        batch, real = samples.batch(chosen[start : start + micro_batch_size], epoch)
        batches.append(batch)
        tokens += real
    return replace(global_batch_of(tuple(batches), origin), tokens=tokens)


def _numbers(samples: Samples, chosen: Array) -> str:
    """The first of the samples `chosen`, by their numbers in the data: `7, 31, 4, ... (64 in all)`."""
    named = ", ".join(str(number) for number in samples.numbers(chosen[:NAMED]))
    return named if len(chosen) <= NAMED else f"{named}, ... ({len(chosen)} in all)"

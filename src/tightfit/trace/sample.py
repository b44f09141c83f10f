"""The largest of more ops or allocations than can be held, and what was left out, as a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from tightfit.trace import Allocation, Op, Trace

T = TypeVar("T", Op, Allocation)
Columns = Mapping[str, Sequence[Any]]

SAMPLED = "the trace is sampled"
"""How a note begins that says what was left out."""


def sampling_notes(trace: Trace) -> list[str]:
    """Sentences on what was left out of a trace; none of one that is whole."""
    return [note for note in trace.notes if note.startswith(SAMPLED)]


def op_sizes(columns: Columns) -> np.ndarray:
    """Seconds of ops; where they are not known, ops are ordered by their FLOPs and bytes."""
    seconds = np.array([s if s is not None else 0.0 for s in columns["seconds"]], dtype=float)
    work = sum(np.array(columns[name], dtype=float) for name in ("flops", "bytes_read", "bytes_written"))
    return np.where(seconds > 0, seconds, 1e-15 * work)


def allocation_sizes(columns: Columns) -> np.ndarray:
    """Bytes of allocations."""
    return np.array(columns["bytes"], dtype=float)


class Largest(Generic[T]):
    """Records handed over a block at a time, of which the `limit` largest are kept, the first of equals; None keeps
    all."""

    def __init__(self, limit: int | None, sizes_of: Callable[[Columns], np.ndarray]) -> None:
        if limit is not None and limit < 2:
            raise ValueError(f"limit: {limit} should be at least 2")
        self._limit, self._sizes_of = limit, sizes_of
        self._sizes = np.zeros(0)
        self.records: list[T] = []
        self.seen, self.total = 0, 0.0

    def add(self, columns: Columns, rows: int, records: Callable[[Sequence[int]], list[T]]) -> None:
        """Take a block. records: makes those of the given numbers."""
        self.seen += rows
        if self._limit is None:
            self.records += records(range(rows))
            return
        sizes = self._sizes_of(columns)
        self.total += float(sizes.sum())
        all_sizes = np.concatenate([self._sizes, sizes])
        kept = np.sort(np.argsort(-all_sizes, kind="stable")[: self._limit])
        held = len(self.records)
        self.records = [self.records[i] for i in kept[kept < held].tolist()] + records(
            (kept[kept >= held] - held).tolist())
        self._sizes = all_sizes[kept]

    def notes(self, of: str, unit: str, longest: str) -> list[str]:
        """A sentence on what was left out, or none."""
        gone = self.seen - len(self.records)
        if not gone:
            return []
        share = max(1 - float(self._sizes.sum()) / self.total, 0.0) if self.total else 0.0
        return [f"{SAMPLED}: {gone:,} of {self.seen:,} {of} were left out ({100 * gone / self.seen:.1f} %), with "
                f"{100 * share:.2g} % of their {unit}; the {longest} are all here"]

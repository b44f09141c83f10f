"""A sample of more ops or allocations than can be held: the largest for certain, of the rest an even share.

Half of what may be kept goes to the largest. The rest each draw a number, from a generator with a fixed seed, and the
lowest are kept, so that one file gives one sample. What was left out is counted, and said in a sentence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from tightfit.trace import Allocation, Op, Trace

T = TypeVar("T", Op, Allocation)

SAMPLED = "the trace is sampled"
"""How a note begins that says what was left out."""


def sampling_notes(trace: Trace) -> list[str]:
    """What was left out of a trace, as sentences; none of one that is whole."""
    return [note for note in trace.notes if note.startswith(SAMPLED)]


class _Sample(ABC, Generic[T]):
    """Records handed over a block at a time, of which `limit` are kept; None keeps all."""

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 2:
            raise ValueError(f"limit: {limit} should be at least 2")
        self._limit = limit
        self._random = np.random.default_rng(0)
        self._records: list[T] = []
        self._sizes = np.zeros(0)
        self._draws = np.zeros(0)
        self._later: list[tuple[np.ndarray, np.ndarray]] = []
        self._least, self._most = -1.0, 2.0  # below the first and above the second a record cannot stay
        self.seen = 0
        self.total = 0.0

    @abstractmethod
    def _sizes_of(self, columns: Mapping[str, Sequence[Any]], rows: int) -> np.ndarray:
        """How large each record is: what decides, and what the share left out is counted in."""

    @abstractmethod
    def _place(self, record: T) -> int:
        """The tick that records are kept in order of."""

    @abstractmethod
    def notes(self) -> list[str]:
        """A sentence on what was left out, or none."""

    def add(self, columns: Mapping[str, Sequence[Any]], rows: int,
            records: Callable[[Sequence[int]], list[T]]) -> None:
        """Take a block. records: makes those of the given numbers."""
        self.seen += rows
        if self._limit is None:
            self._records += records(range(rows))
            return
        sizes, draws = self._sizes_of(columns, rows), self._random.random(rows)
        self.total += float(sizes.sum())
        chosen = np.flatnonzero((sizes > self._least) | (draws < self._most))
        self._records += records(chosen.tolist())
        self._later.append((sizes[chosen], draws[chosen]))
        if len(self._records) > 2 * self._limit:
            self._shrink()

    def _shrink(self) -> None:
        """Keep the largest, and of the others those that drew the lowest numbers."""
        assert self._limit is not None
        self._sizes = np.concatenate([self._sizes, *(sizes for sizes, _ in self._later)])
        self._draws = np.concatenate([self._draws, *(draws for _, draws in self._later)])
        self._later.clear()
        if len(self._records) <= self._limit:
            return
        largest = self._limit // 2
        order = np.argsort(-self._sizes, kind="stable")
        rest = order[largest:]
        rest = rest[np.argsort(self._draws[rest], kind="stable")][: self._limit - largest]
        self._least = float(self._sizes[order[largest - 1]])
        self._most = float(self._draws[rest].max())
        chosen = np.sort(np.concatenate([order[:largest], rest]))
        self._records = [self._records[i] for i in chosen.tolist()]
        self._sizes, self._draws = self._sizes[chosen], self._draws[chosen]

    def kept(self) -> list[T]:
        """What is kept, in the order of its ticks; all of it in the order it came where nothing was left out."""
        if self._limit is not None and self.seen > self._limit:
            self._shrink()
            return sorted(self._records, key=self._place)
        return self._records

    def _left_out(self) -> tuple[int, float]:
        """How many records were left out, and what share of all sizes they had."""
        gone = self.seen - len(self._records)
        share = 1 - float(self._sizes.sum()) / self.total if gone and self.total else 0.0
        return gone, max(share, 0.0)


class LongestOps(_Sample[Op]):
    """Ops, the longest for certain; where their seconds are not known, those of the most FLOPs and bytes."""

    def _sizes_of(self, columns: Mapping[str, Sequence[Any]], rows: int) -> np.ndarray:
        seconds = np.array([s if s is not None else 0.0 for s in columns["seconds"]], dtype=float)
        work = sum(np.array(columns[name], dtype=float) for name in ("flops", "bytes_read", "bytes_written"))
        return np.where(seconds > 0, seconds, 1e-15 * work)

    def _place(self, record: Op) -> int:
        return record.tick

    def notes(self) -> list[str]:
        gone, share = self._left_out()
        return [f"{SAMPLED}: {gone:,} of {self.seen:,} ops were left out ({100 * gone / self.seen:.1f} %), "
                f"with {100 * share:.2g} % of their time; the longest are all here"] if gone else []


class LargestAllocations(_Sample[Allocation]):
    """Allocations, the largest for certain."""

    def _sizes_of(self, columns: Mapping[str, Sequence[Any]], rows: int) -> np.ndarray:
        return np.array(columns["bytes"], dtype=float)

    def _place(self, record: Allocation) -> int:
        return record.born

    def notes(self) -> list[str]:
        gone, share = self._left_out()
        return [f"{SAMPLED}: {gone:,} of {self.seen:,} allocations were left out "
                f"({100 * gone / self.seen:.1f} %), with {100 * share:.2g} % of their bytes; the largest are all here"
                ] if gone else []

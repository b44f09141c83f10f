"""The CUDA allocator's own record of what it handed out, with a word on every entry. Private to torch.

Where this version of torch keeps no such record, or no words, there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

ENTRIES = 2_000_000
"""Entries that are kept at most; the oldest go first."""

ALLOCATED, RELEASED = "alloc", "free_completed"
"""Actions of entries for memory that is handed out, and for memory that is given back. Others are of segments."""


def available() -> bool:
    """Whether this torch keeps a record with words."""
    names = ("_record_memory_history", "_snapshot", "_set_memory_metadata")
    return all(hasattr(torch.cuda.memory, name) for name in names)


@contextmanager
def recorded() -> Iterator[None]:
    """Keep the record meanwhile; `snapshot` reads it, inside."""
    record: Any = torch.cuda.memory._record_memory_history
    record(max_entries=ENTRIES, stacks="python")
    try:
        yield
    finally:
        record(enabled=None)


def snapshot() -> dict[str, Any]:
    """The record so far, in the form that PyTorch's memory_viz reads once it is pickled."""
    found: dict[str, Any] = torch.cuda.memory._snapshot()
    return found


@contextmanager
def word(text: str) -> Iterator[None]:
    """The word on what is recorded meanwhile."""
    say: Any = torch.cuda.memory._set_memory_metadata
    say(text)
    try:
        yield
    finally:
        say("")


class Change(NamedTuple):
    """A change of memory. bytes: asked for; negative: given back. time_ns: since 1970, where it is known, else 0."""

    address: int
    bytes: int
    word: str
    time_ns: int


def changes(record: Mapping[str, Any], device: int = 0) -> Iterator[Change]:
    """The changes of memory that were recorded, in order."""
    traces = record["device_traces"]
    for entry in traces[device] if device < len(traces) else ():
        if entry["action"] in (ALLOCATED, RELEASED):
            sign = 1 if entry["action"] == ALLOCATED else -1
            yield Change(entry["addr"], sign * entry["size"], entry.get("user_metadata") or "",
                         1000 * entry.get("time_us", 0))

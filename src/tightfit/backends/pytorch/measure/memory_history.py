"""The CUDA allocator's own record of what it handed out, for PyTorch's memory_viz. Private to torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ENTRIES = 2_000_000
"""Entries that are kept at most; the oldest go first."""


@contextmanager
def recorded() -> Iterator[dict[str, Any]]:
    """Keep the record meanwhile; it is in the dictionary once the block has ended, which stays empty where this torch
    keeps none."""
    memory: Any = torch.cuda.memory
    record: dict[str, Any] = {}
    if not (hasattr(memory, "_record_memory_history") and hasattr(memory, "_snapshot")):
        yield record
        return
    memory._record_memory_history(max_entries=ENTRIES, stacks="python")
    try:
        yield record
        record.update(memory._snapshot())
    finally:
        memory._record_memory_history(enabled=None)

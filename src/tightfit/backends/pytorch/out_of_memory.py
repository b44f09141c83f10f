"""Running out of memory, said in one sentence: while doing what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tightfit.errors import OutOfMemory

CPU_ALLOCATOR = "can't allocate memory"
"""Text of the CPU allocator's error; it raises a plain RuntimeError."""
ASKED = "ried to allocate"
"""Part of the sentence in which each device's allocator says how much was asked for; it is not the first."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an allocator's, of the device or of the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error)


@contextmanager
def memory_guard(doing: Callable[[], str]) -> Iterator[None]:
    """Turn the device's out-of-memory error into ours, naming what `doing` says was under way. Raises OutOfMemory."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        sentences = " ".join(str(error).split()).split(". ")
        said = next((sentence for sentence in sentences if ASKED in sentence), sentences[0])
        raise OutOfMemory(f"out of memory in {doing()}: {said}") from None

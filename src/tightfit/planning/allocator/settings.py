"""The sizes by which PyTorch's CUDA caching allocator works, and what can be set of it."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.devices import MIB

MIN_BLOCK = 512
"""kMinBlockSize: every size is rounded up to a multiple of it."""
SMALL = MIB
"""kSmallSize: the largest size that the small pool serves."""
SMALL_SEGMENT = 2 * MIB
"""kSmallBuffer: a segment of the small pool, and its page in an expandable segment."""
LARGE_SEGMENT = 20 * MIB
"""large_segment_size: a segment for sizes below MIN_LARGE, and the large pool's page in an expandable segment."""
MIN_LARGE = 10 * MIB
"""kMinLargeAlloc: from this size on, a size gets a segment of its own."""
ROUND_LARGE = 2 * MIB
"""kRoundLarge: such a segment is a multiple of it."""
UNKNOWN_DEVICE = 1 << 40
"""Stands for the device's memory where it is not known: only the address space of expandable segments depends on it."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Settings of `PYTORCH_ALLOC_CONF` that are simulated, all others having their defaults; and the steps after which
    a run gives back what is cached, None where it does not."""

    expandable_segments: bool = False
    empty_cache_steps: int | None = None


def rounded_size(size: int) -> int:
    """The size of a block for `size` bytes (round_size)."""
    return (size + MIN_BLOCK - 1) & -MIN_BLOCK


def segment_size(rounded: int) -> int:
    """Size of the segment that serves a rounded size (get_allocation_size)."""
    if rounded <= SMALL:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE:
        return LARGE_SEGMENT
    return -(-rounded // ROUND_LARGE) * ROUND_LARGE

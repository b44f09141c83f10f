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
    """What `PYTORCH_ALLOC_CONF` sets, with its defaults.

    max_split_size: blocks of at least so many bytes are never split; None splits all.
    max_non_split_rounding: by less than so many bytes, such a block may be larger than what it serves.
    large_segment: bytes of the large pool's shared segments and pages.
    roundup_power2_divisions: into how many parts each power of two is divided for rounding; 16 numbers, for sizes
        below 2 MiB, below 4 MiB and so on; 0 rounds to 512 bytes.
    garbage_collection_threshold: above this share of the allocator's limit, old cached segments are released; 0 never.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    large_segment: int = LARGE_SEGMENT
    roundup_power2_divisions: tuple[int, ...] = (0,) * 16
    garbage_collection_threshold: float = 0.0

    def rounded(self, size: int) -> int:
        """The size of a block for `size` bytes (round_size, roundup_power2_next_division)."""
        magnitude = size.bit_length() - 1
        divisions = self.roundup_power2_divisions
        parts = divisions[min(max(magnitude - 20, 0), len(divisions) - 1)]
        step = (1 << magnitude) // parts if parts > 1 and size > MIN_BLOCK * parts else MIN_BLOCK
        return -(-size // step) * step

    def segment_size(self, rounded: int) -> int:
        """What the device is asked for to serve a rounded size (get_allocation_size)."""
        if rounded <= SMALL:
            return SMALL_SEGMENT
        if rounded < MIN_LARGE:
            return self.large_segment
        return -(-rounded // ROUND_LARGE) * ROUND_LARGE

"""PyTorch's CUDA caching allocator, simulated: what it reserves of a device's memory for a sequence of allocations.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.{h,cpp}` of torch 2.11 to 2.13,
whose functions the comments name. Left out, because training does not use them: private pools (CUDA graphs, memory
pools), and every setting but expandable segments. No rule that is simulated differs between a revision of the source
from before 2.12 and one from after it. On an H100 every block lay where it is put here, over 130,000 allocations of
training steps: results/allocator_recordings-h100-80gb-hbm3.json.

One device. Sizes are bytes. A block belongs for good to the stream that its segment was reserved for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from tightfit.planning.allocator.blocks import Block, Pool, Space
from tightfit.planning.allocator.settings import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    SMALL,
    SMALL_SEGMENT,
    UNKNOWN_DEVICE,
    AllocatorSettings,
    rounded_size,
    segment_size,
)


class OutOfCapacity(Exception):
    """The device has no more, and nothing cached is left to release. needed: reserved bytes that would do."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


class CachingAllocator:
    """The allocator of one device. Its figures are those of `torch.cuda.memory_stats`.

    capacity: bytes that the device has for it; None for no end. May be changed at any time.
    limit: what `set_per_process_memory_fraction` allows it; None for no limit. May be changed at any time.
    allocated: bytes of the blocks in use, with what rounding adds and with remainders too small to split off.
    requested: bytes asked for. reserved: bytes taken from the device.
    retries: how often it released all cached memory to try again, `num_alloc_retries`.
    released: segments, and pages of expandable ones, that it gave back to the device.
    """

    def __init__(
        self,
        capacity: int | None = None,
        settings: AllocatorSettings | None = None,
        *,
        limit: int | None = None,
        device_memory: int | None = None,
        address: Callable[[int], int] | None = None,
    ) -> None:
        """device_memory: the device's whole memory; by default the capacity.

        address: tells where the next segment of so many bytes lies; by default behind the one before. Among equal
            cached blocks the one with the lowest address serves.
        """
        self.capacity, self.limit = capacity, limit
        self.allocated = self.reserved = self.requested = 0
        self.peak_allocated = self.peak_reserved = self.peak_requested = 0
        self.retries = self.released = 0
        self._device_memory = device_memory or capacity or UNKNOWN_DEVICE
        self._address = address or self._next_address
        self._end = 0
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._needed = 0
        self._expandable = settings is not None and settings.expandable_segments

    def malloc(self, size: int, stream: int = 0) -> Block:
        """A block of at least `size` bytes, which are at least 1. Raises OutOfCapacity."""
        rounded = rounded_size(size)
        small = rounded <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(small)
        block = self._cached(pool, rounded) or self._fresh(pool, rounded)
        if self._splits(pool, block.size - rounded):
            pool.add(block.cut(rounded))
        block.free = False
        block.requested = size
        self.requested += size
        self.allocated += block.size
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Give back a block that no other stream uses."""
        self.free_requested(block)
        self.free_completed(block)

    def free_requested(self, block: Block) -> None:
        """The block is no longer allocated; another stream may still be using it."""
        self.allocated -= block.size
        self.requested -= block.requested

    def free_completed(self, block: Block) -> None:
        """The block can serve again, as one with its free neighbours (free_block)."""
        block.pool.add(block.merge())

    def empty_cache(self) -> None:
        """Give the device back every segment and every page with nothing in it (release_cached_blocks)."""
        for pool in self._pools.values():
            for _, _, block in pool.cached.copy():
                if block.space is not None:
                    self._unmap(block, block.space)
                elif block.alone:
                    self._release(block)

    def _splits(self, pool: Pool, rest: int) -> bool:
        """Whether what is left of a block is split off; else it counts as allocated (should_split)."""
        return rest >= MIN_BLOCK if pool.small or self._expandable else rest > SMALL

    def _cached(self, pool: Pool, rounded: int) -> Block | None:
        """The smallest cached block that is large enough, the lowest of equals (get_free_block)."""
        cached = pool.cached
        at = bisect_left(cached, (rounded,))
        if at == len(cached):
            return None
        if self._expandable:  # a block before unmapped pages is as large as it can grow
            while at + 1 < len(cached) and cached[at + 1][2].room < cached[at][2].room:
                at += 1
        return cached.pop(at)[2]

    def _fresh(self, pool: Pool, rounded: int) -> Block:
        """A block of newly reserved memory; where the device has no more, cached memory is released (malloc)."""
        block = self._reserve(pool, rounded)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._reserve(pool, rounded)
        if block is None:
            raise OutOfCapacity(self._needed)
        return block

    def _reserve(self, pool: Pool, rounded: int) -> Block | None:
        """A new segment, or pages of an expandable one; None where the device has no more (alloc_block)."""
        size = segment_size(rounded)
        if self.limit is not None and self.reserved + size > self.limit:
            self._needed = self.reserved + size
            return None
        if self._expandable:
            return self._expand(pool, rounded)
        return Block(self._address(size), size, pool) if self._take(size) else None

    def _take(self, size: int) -> bool:
        """Take so much of the device's memory, if it has it."""
        total = self.reserved + size
        if self.capacity is not None and total > self.capacity:
            self._needed = total
            return False
        self.reserved = total
        self.peak_reserved = max(self.peak_reserved, total)
        return True

    def _next_address(self, size: int) -> int:
        start = self._end
        self._end += size
        return start

    def _release(self, block: Block) -> None:
        """Give the device back a cached segment (release_block)."""
        block.pool.discard(block)
        self.reserved -= block.size
        self.released += 1

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """A block of at least `size`, with pages mapped as needed (try_allocate_expandable_block).

        Pages mapped before the device had no more stay, cached.
        """
        block = self._expandable_run(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            behind = block.next
            assert behind is not None
            if not self._map(behind, min(size - block.size, behind.size)):
                return None
            block = behind  # which has taken in what lay before it
        pool.discard(block)
        return block

    def _expandable_run(self, pool: Pool, size: int) -> Block:
        """The first block of the free run, mapped or not, with room for `size` at the lowest address; of a new segment
        where there is none (find_expandable_block)."""
        for _, unmapped in pool.unmapped:
            before = unmapped.prev
            first = before if before is not None and before.free else unmapped
            if first.free_run(size) >= size:
                return first
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        most = max(self._device_memory + self._device_memory // 8, size)  # more than there is, where nothing limits it
        span = -(-most // page) * page
        start = self._address(span)
        block = Block(start, span, pool, Space(start, page), mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Back the beginning of an unmapped block with whole pages, at least `size`; it becomes one with its free
        neighbours and is cached. False where the device has no more (map_block)."""
        assert block.space is not None
        mapped = -(-size // block.space.page) * block.space.page
        if not self._take(mapped):
            return False
        block.pool.discard(block)
        if mapped < block.size:
            block.pool.add(block.cut(mapped))
        block.mapped = True
        block.pool.add(block.merge())
        return True

    def _unmap(self, block: Block, space: Space) -> None:
        """Give the device back the whole pages inside a cached block; the rest of it stays cached (unmap_block)."""
        end = block.address + block.size
        first = space.start - (space.start - block.address) // space.page * space.page
        last = end - (end - space.start) % space.page
        if first >= last:
            return
        block.pool.discard(block)
        if last < end:
            block.pool.add(block.cut(last - block.address))
        if block.address < first:
            before, block = block, block.cut(first - block.address)
            before.pool.add(before)
        block.mapped = False
        block.merge()
        self.reserved -= last - first
        self.released += (last - first) // space.page
        if not block.alone:  # with nothing else in it, the segment goes too (release_expandable_segment)
            block.pool.add(block)

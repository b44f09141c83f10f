"""PyTorch's CUDA caching allocator, simulated: what it reserves of a device's memory for a sequence of allocations.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.{h,cpp}` of torch 2.11 to 2.13,
whose functions the comments name. Left out, because training does not use them: private pools (CUDA graphs, memory
pools), settings changed during a run, and `throw_on_cudamalloc_oom` (newer than 2.11, off by default). No rule that is
simulated differs between a revision of the source from before 2.12 and one from after it. Not yet measured on a GPU:
`benchmarks/allocator_snapshots.py` does that.

One device. Sizes are bytes. A block belongs for good to the stream that its segment was reserved for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from tightfit.planning.allocator.blocks import Block, Pool, Space
from tightfit.planning.allocator.settings import (
    MIN_BLOCK,
    SMALL,
    SMALL_SEGMENT,
    UNKNOWN_DEVICE,
    AllocatorSettings,
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
        self.settings = settings or AllocatorSettings()
        self.capacity, self.limit = capacity, limit
        self.allocated = self.reserved = self.requested = 0
        self.peak_allocated = self.peak_reserved = self.peak_requested = 0
        self.retries = 0
        self._device_memory = device_memory or capacity or UNKNOWN_DEVICE
        self._address = address or self._next_address
        self._end = 0
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._needed = 0
        self._searches = 0
        self._expandable = self.settings.expandable_segments
        self._rounds_up = any(self.settings.roundup_power2_divisions)

    def malloc(self, size: int, stream: int = 0) -> Block:
        """A block of at least `size` bytes, which are at least 1. Raises OutOfCapacity."""
        rounded = self.settings.rounded(size) if self._rounds_up else (size + MIN_BLOCK - 1) & -MIN_BLOCK
        small = rounded <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(small)
        block = self._cached(pool, rounded) or self._fresh(pool, rounded)
        if self._splits(pool, rounded, block.size - rounded):
            self._keep(block.cut(rounded))
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
        self._keep(block.merge())

    def empty_cache(self) -> None:
        """Give the device back every segment and every page with nothing in it (release_cached_blocks)."""
        for pool in self._pools.values():
            for _, _, block in pool.cached.copy():
                if block.space is not None:
                    self._unmap(block, block.space)
                elif block.alone:
                    self._release(block)

    def _splits(self, pool: Pool, rounded: int, rest: int) -> bool:
        """Whether what is left of a block is split off; else it counts as allocated (should_split)."""
        if pool.small or self._expandable:
            return rest >= MIN_BLOCK
        threshold = self.settings.max_split_size
        return rest > SMALL and (threshold is None or rounded < threshold)

    def _cached(self, pool: Pool, rounded: int) -> Block | None:
        """The smallest cached block that is large enough, the lowest of equals (get_free_block)."""
        cached = pool.cached
        self._searches += not pool.small
        at = bisect_left(cached, (rounded,))
        if at == len(cached):
            return None
        if self._expandable:  # a block before unmapped pages is as large as it can grow
            while at + 1 < len(cached) and cached[at + 1][2].room < cached[at][2].room:
                at += 1
        threshold = self.settings.max_split_size
        if threshold is not None:
            size = cached[at][0]
            if rounded < threshold <= size:
                return None
            if rounded >= threshold and size >= rounded + self.settings.max_non_split_rounding:
                return None
        return cached.pop(at)[2]

    def _fresh(self, pool: Pool, rounded: int) -> Block:
        """A block of newly reserved memory; where the device has no more, cached memory is released (malloc)."""
        self._collect()
        block = self._reserve(pool, rounded)
        if block is None and self._release_oversize(pool, rounded):
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
        size = self.settings.segment_size(rounded)
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

    def _keep(self, block: Block) -> None:
        block.since = self._searches
        block.pool.add(block)

    def _release(self, block: Block) -> None:
        """Give the device back a cached segment (release_block)."""
        block.pool.discard(block)
        self.reserved -= block.size

    def _release_oversize(self, pool: Pool, rounded: int) -> bool:
        """Release as few as will do of the segments too large to split (release_available_cached_blocks)."""
        threshold = self.settings.max_split_size
        if threshold is None or self._expandable:
            return False
        wanted = max(rounded, threshold)
        at = bisect_left(pool.cached, (wanted,))
        if at < len(pool.cached):
            self._release(pool.cached[at][2])
            return True
        released = 0
        for size, _, block in reversed(pool.cached.copy()):
            if released >= wanted or size < threshold:
                break
            released += size
            self._release(block)
        return released >= wanted

    def _collect(self) -> None:
        """Release cached segments of at least average age, until enough are (garbage_collect_cached_blocks)."""
        share = self.settings.garbage_collection_threshold
        if share == 0 or self.limit is None or self._expandable:
            return
        excess = self.reserved - int(share * self.limit)
        blocks = [b for pool in self._pools.values() if not pool.small for _, _, b in pool.cached if b.alone]
        while excess > 0 and blocks:
            mean = sum(block.since for block in blocks) / len(blocks)
            for block in [b for b in blocks if b.since <= mean]:
                blocks.remove(block)
                excess -= block.size
                self._release(block)

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
        """Where a run of free blocks, mapped or not, with room for `size` begins at the lowest address; in a new
        segment where there is none (find_expandable_block)."""
        for _, unmapped in pool.unmapped:
            before = unmapped.prev
            first = before if before is not None and before.free else unmapped
            if first.free_run(size) >= size:
                return first
        page = SMALL_SEGMENT if pool.small else self.settings.large_segment
        span = -(-(self._device_memory + self._device_memory // 8) // page) * page
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
        self._keep(block.merge())
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
            self._keep(block.cut(last - block.address))
        if block.address < first:
            before, block = block, block.cut(first - block.address)
            self._keep(before)
        block.mapped = False
        block.merge()
        self.reserved -= last - first
        if not block.alone:  # with nothing else in it, the segment goes too (release_expandable_segment)
            block.pool.add(block)

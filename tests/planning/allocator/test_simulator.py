"""Each rule of the caching allocator, with values worked out from the C++ source, and all rules together against a slow
second implementation.

Function names in the comments are those of torch's c10/cuda/CUDACachingAllocator.cpp, read in two revisions: one before
2.12 (without `throw_on_cudamalloc_oom`) and one after. No allocator ran on a GPU for these tests.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.planning.slow_allocator import SlowAllocator
from tightfit.devices import MIB
from tightfit.planning.allocator.settings import AllocatorSettings
from tightfit.planning.allocator.simulator import CachingAllocator, OutOfCapacity

KIB = 1024
EXPANDABLE = AllocatorSettings(expandable_segments=True)


# --- choosing, splitting, merging ----------------------------------------------------------------------------------


def test_small_and_large_sizes_have_their_own_pools():
    """get_pool: 20 MiB cached in the large pool serve no size of 1 MiB."""
    simulated = CachingAllocator()
    simulated.free(simulated.malloc(2 * MIB))
    simulated.malloc(MIB)
    assert simulated.reserved == 22 * MIB


def test_the_smallest_block_that_is_large_enough_serves():
    """get_free_block: lower_bound in a set ordered by size."""
    simulated = CachingAllocator()
    blocks = [simulated.malloc(size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        simulated.free(block)
    assert simulated.malloc(25 * MIB).address == blocks[2].address


def test_among_equal_blocks_the_lowest_address_serves():
    """BlockComparatorSize: size, then address."""
    simulated = CachingAllocator()
    blocks = [simulated.malloc(20 * MIB) for _ in range(3)]
    for block in (blocks[2], blocks[1]):
        simulated.free(block)
    assert simulated.malloc(20 * MIB).address == blocks[1].address


def test_small_blocks_are_split_down_to_512_bytes():
    """should_split: remaining >= kMinBlockSize."""
    simulated = CachingAllocator()
    first = simulated.malloc(MIB)
    second = simulated.malloc(MIB - 512)
    third = simulated.malloc(1)  # the last 512 bytes of the segment
    assert [b.address - first.address for b in (second, third)] == [MIB, 2 * MIB - 512]
    assert simulated.reserved == 2 * MIB
    assert simulated.allocated == 2 * MIB
    simulated.malloc(1)
    assert simulated.reserved == 4 * MIB


@pytest.mark.parametrize(("size", "block"), [(19 * MIB, 20 * MIB), (19 * MIB - 512, 19 * MIB - 512)])
def test_large_blocks_are_split_where_more_than_1_mib_is_left(size: int, block: int):
    """should_split: remaining > kSmallSize; what is not split off counts as allocated."""
    simulated = CachingAllocator()
    simulated.free(simulated.malloc(20 * MIB))
    assert simulated.malloc(size).size == block
    assert (simulated.allocated, simulated.requested, simulated.reserved) == (block, size, 20 * MIB)


def test_free_neighbours_become_one():
    """try_merge_blocks: with the one before and the one behind."""
    simulated = CachingAllocator()
    first, middle, last = (simulated.malloc(6 * MIB) for _ in range(3))  # and 2 MiB behind, cached
    simulated.free(first)
    simulated.free(last)
    other = simulated.malloc(9 * MIB)  # neither 6 nor 8 MiB serve
    assert simulated.reserved == 40 * MIB
    simulated.free(other)
    simulated.free(middle)
    assert simulated.malloc(18 * MIB).address == first.address
    assert simulated.reserved == 40 * MIB


def test_a_block_belongs_to_its_stream():
    """BlockComparatorSize puts the stream first; get_free_block stays within it."""
    simulated = CachingAllocator()
    simulated.free(simulated.malloc(20 * MIB, stream=1))
    simulated.malloc(20 * MIB, stream=2)
    assert simulated.reserved == 40 * MIB
    simulated.malloc(20 * MIB, stream=1)
    assert simulated.reserved == 40 * MIB


def test_a_block_that_another_stream_still_uses_serves_only_later():
    """free: allocated bytes fall at once; free_block, and with it merging and reuse, waits for the events."""
    simulated = CachingAllocator()
    first, second = simulated.malloc(8 * MIB), simulated.malloc(12 * MIB)
    simulated.free_requested(first)
    assert simulated.allocated == 12 * MIB
    simulated.free(second)  # merges with nothing
    simulated.malloc(15 * MIB)
    assert simulated.reserved == 36 * MIB
    simulated.free_completed(first)
    assert simulated.malloc(20 * MIB).address == first.address


# --- the end of memory ---------------------------------------------------------------------------------------------


def test_cached_segments_are_released_where_the_device_has_no_more():
    """malloc: alloc_block fails, release_cached_blocks, alloc_block again; num_alloc_retries counts it."""
    simulated = CachingAllocator(capacity=60 * MIB)
    simulated.free(simulated.malloc(40 * MIB))
    simulated.malloc(50 * MIB)
    assert (simulated.reserved, simulated.peak_reserved, simulated.retries) == (50 * MIB, 50 * MIB, 1)


def test_segments_with_anything_in_use_are_not_released():
    """release_blocks: only blocks without neighbours."""
    simulated = CachingAllocator(capacity=60 * MIB)
    simulated.malloc(2 * MIB)   # 18 MiB of its segment are cached
    simulated.free(simulated.malloc(30 * MIB))
    with pytest.raises(OutOfCapacity) as caught:
        simulated.malloc(41 * MIB)
    assert caught.value.needed == 62 * MIB  # 20 and a segment of 42
    assert (simulated.reserved, simulated.retries) == (20 * MIB, 1)
    simulated.malloc(40 * MIB)
    assert simulated.reserved == 60 * MIB


def test_both_pools_are_released():
    """release_cached_blocks: large_blocks, then small_blocks."""
    simulated = CachingAllocator(capacity=22 * MIB)
    simulated.free(simulated.malloc(1))
    simulated.malloc(22 * MIB)
    assert simulated.reserved == 22 * MIB


def test_the_limit_counts_like_the_capacity():
    """alloc_block: total_allocated_memory + alloc_size > allowed_memory_maximum."""
    simulated = CachingAllocator(limit=39 * MIB)
    simulated.malloc(2 * MIB)
    with pytest.raises(OutOfCapacity) as caught:
        simulated.malloc(19 * MIB)  # a segment of 20 MiB
    assert caught.value.needed == 40 * MIB
    simulated.limit = 40 * MIB
    simulated.malloc(19 * MIB)
    assert simulated.reserved == 40 * MIB


def test_empty_cache_releases_whole_segments():
    """emptyCache: release_cached_blocks."""
    simulated = CachingAllocator()
    kept = simulated.malloc(2 * MIB)
    simulated.free(simulated.malloc(30 * MIB))
    simulated.free(simulated.malloc(1))
    simulated.empty_cache()
    assert (simulated.reserved, simulated.retries) == (20 * MIB, 0)
    simulated.free(kept)
    simulated.empty_cache()
    assert simulated.reserved == 0


# --- all rules together --------------------------------------------------------------------------------------------


SIZES = (300, 512 * KIB, 900 * KIB + 13, MIB, MIB + 1, 3 * MIB, 7 * MIB + 5, 10 * MIB, 19 * MIB + 3, 33 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("capacity", [None, 90 * MIB, 200 * MIB])
@pytest.mark.parametrize("seed", range(10))
def test_the_simulator_equals_a_slow_reimplementation(seed: int, capacity: int | None, expandable: bool):
    """Every address, all that is reserved and allocated, every retry and every failure, after each of 250 events."""
    random = np.random.default_rng(seed)
    settings = AllocatorSettings(expandable_segments=expandable)
    fast, slow = CachingAllocator(capacity, settings), SlowAllocator(capacity, expandable)
    live: list = []
    failures = 0
    for _ in range(250):
        if random.random() < 0.02:
            fast.empty_cache()
            slow.empty_cache()
        elif live and random.random() < 0.47:
            block, (segment, start) = live.pop(int(random.integers(len(live))))
            fast.free(block)
            del segment.used[start]
        else:
            size, stream = int(random.choice(SIZES)), int(random.random() < 0.2)
            place = slow.malloc(size, stream)
            if place is None:
                failures += 1
                with pytest.raises(OutOfCapacity):
                    fast.malloc(size, stream)
            else:
                block = fast.malloc(size, stream)
                assert block.address == place[0].start + place[1]
                live.append((block, place))
        assert (fast.reserved, fast.allocated, fast.retries) == (slow.reserved, slow.allocated, slow.retries)
    if capacity == 90 * MIB:
        assert failures
        assert fast.retries > failures

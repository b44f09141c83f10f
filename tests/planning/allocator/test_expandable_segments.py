"""Expandable segments: one address space, whose pages are mapped and given back. See `test_simulator.py`."""

from __future__ import annotations

import pytest

from tightfit.devices import MIB
from tightfit.planning.allocator.settings import AllocatorSettings
from tightfit.planning.allocator.simulator import CachingAllocator, OutOfCapacity

EXPANDABLE = AllocatorSettings(expandable_segments=True)


@pytest.mark.parametrize(("size", "reserved"), [(1, 2), (MIB, 2), (MIB + 1, 20), (20 * MIB, 20), (20 * MIB + 1, 40)])
def test_expandable_segments_are_mapped_page_by_page(size: int, reserved: int):
    """find_expandable_block: pages of kSmallBuffer or large_segment_size; ExpandableSegment::map: whole pages."""
    simulated = CachingAllocator(settings=EXPANDABLE)
    simulated.malloc(size)
    assert simulated.reserved == reserved * MIB


def test_expandable_blocks_are_split_down_to_512_bytes():
    """should_split: as in the small pool."""
    simulated = CachingAllocator(settings=EXPANDABLE)
    simulated.malloc(19 * MIB + MIB // 2)
    assert simulated.allocated == 19 * MIB + MIB // 2
    assert simulated.malloc(MIB).size == MIB  # in the small pool: no part of the 512 KiB left
    assert simulated.reserved == 22 * MIB


def test_an_expandable_segment_grows_at_its_end():
    """try_allocate_expandable_block: the free end, and new pages for what it lacks."""
    simulated = CachingAllocator(settings=EXPANDABLE)
    first = simulated.malloc(15 * MIB)
    second = simulated.malloc(26 * MIB)
    assert second.address - first.address == 15 * MIB
    assert simulated.reserved == 60 * MIB  # 41 MiB in pages of 20


def test_best_fit_counts_what_the_end_can_grow_to():
    """get_free_block: expandable_size; a larger block inside goes before a smaller one at the end."""
    simulated = CachingAllocator(settings=EXPANDABLE)
    inside, guard = simulated.malloc(18 * MIB), simulated.malloc(6 * MIB)
    simulated.free(inside)  # 18 MiB inside, 16 MiB at the end
    assert simulated.malloc(10 * MIB).address == inside.address
    assert guard.address - inside.address == 18 * MIB


def test_empty_cache_unmaps_whole_pages_and_their_place_is_used_again():
    """unmap_block keeps the parts of pages; find_expandable_block starts at the lowest run of free blocks."""
    simulated = CachingAllocator(settings=EXPANDABLE)
    before, inside, behind = (simulated.malloc(size * MIB) for size in (5, 40, 15))
    start = before.address
    simulated.free(inside)  # from 5 to 45 MiB: page 1 whole, parts of pages 0 and 2
    simulated.empty_cache()
    assert simulated.reserved == 40 * MIB
    block = simulated.malloc(12 * MIB)  # from 5 to 17 MiB of page 0
    assert block.address == start + 5 * MIB
    assert simulated.reserved == 40 * MIB
    simulated.free(block)
    block = simulated.malloc(38 * MIB)  # 15 cached, 20 unmapped, 3 of the 5 cached behind: one page is mapped
    assert block.address == start + 5 * MIB
    assert simulated.reserved == 60 * MIB
    assert behind.address == start + 45 * MIB


def test_an_empty_expandable_segment_is_given_up():
    """release_expandable_segment: the next one lies elsewhere."""
    simulated = CachingAllocator(settings=EXPANDABLE)
    block = simulated.malloc(30 * MIB)
    address = block.address
    simulated.free(block)
    simulated.empty_cache()
    assert simulated.reserved == 0
    assert simulated.malloc(30 * MIB).address != address


def test_expandable_segments_belong_to_a_stream():
    """find_expandable_block: (*it)->stream == stream."""
    simulated = CachingAllocator(settings=EXPANDABLE)
    simulated.malloc(5 * MIB, stream=1)
    simulated.malloc(5 * MIB, stream=2)
    assert simulated.reserved == 40 * MIB


def test_pages_of_one_pool_are_released_for_another():
    """malloc: release_cached_blocks unmaps, then the mapping is tried again."""
    simulated = CachingAllocator(capacity=21 * MIB, settings=EXPANDABLE)
    simulated.free(simulated.malloc(1))
    simulated.malloc(15 * MIB)
    assert (simulated.reserved, simulated.retries) == (20 * MIB, 1)
    with pytest.raises(OutOfCapacity) as caught:
        simulated.malloc(10 * MIB)  # 5 MiB are free: one more page
    assert caught.value.needed == 40 * MIB


def test_all_pages_of_a_mapping_are_there_or_none():
    """ExpandableSegment::map: cuMemCreate fails, the handles made before it are released."""
    simulated = CachingAllocator(capacity=50 * MIB, settings=EXPANDABLE)
    with pytest.raises(OutOfCapacity) as caught:
        simulated.malloc(50 * MIB)
    assert (simulated.reserved, caught.value.needed) == (0, 60 * MIB)


def test_a_gap_that_was_filled_stays_filled_where_the_end_cannot_grow():
    """try_allocate_expandable_block: map_block by map_block; a failure leaves the earlier ones mapped and cached."""
    simulated = CachingAllocator(capacity=80 * MIB, settings=EXPANDABLE)
    blocks = [simulated.malloc(20 * MIB) for _ in range(4)]
    simulated.free(blocks[1])
    simulated.free(blocks[3])
    simulated.empty_cache()  # pages 1 and 3 are unmapped
    assert simulated.reserved == 40 * MIB
    simulated.free(blocks[2])
    with pytest.raises(OutOfCapacity):
        simulated.malloc(100 * MIB)  # page 1 is mapped before page 2; then four more would make 120 MiB
    # Released before the second try, which again maps page 1 to 5 at once, and fails whole.
    assert simulated.reserved == 20 * MIB


def test_the_limit_counts_segment_sizes_and_not_pages():
    """alloc_block compares alloc_size, which is rounded to 2 MiB, and try_allocate_expandable_block maps 20 MiB."""
    simulated = CachingAllocator(limit=24 * MIB, settings=EXPANDABLE)
    simulated.malloc(22 * MIB)
    assert simulated.reserved == 40 * MIB


def test_more_than_a_device_has_is_reserved_where_nothing_limits_it():
    allocator = CachingAllocator(None, EXPANDABLE, device_memory=40 * MIB)
    allocator.malloc(100 * MIB)
    assert allocator.peak_reserved == 100 * MIB

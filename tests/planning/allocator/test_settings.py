"""The allocator's sizes: what is rounded to what, and how large segments are."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tightfit.devices import MIB
from tightfit.planning.allocator import settings
from tightfit.planning.allocator.simulator import CachingAllocator


def test_constants_are_those_of_the_installed_torch():
    """c10/core/AllocatorConfig.h ships with torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    header = Path(spec.origin).parent / "include/c10/core/AllocatorConfig.h"
    text = header.read_text()
    named = {name: int(value) for name, value in re.findall(r"constexpr size_t (k\w+) = (\d+);", text)}
    ours = {"kSmallBuffer": settings.SMALL_SEGMENT, "kMinBlockSize": settings.MIN_BLOCK, "kSmallSize": settings.SMALL,
            "kMinLargeAlloc": settings.MIN_LARGE, "kRoundLarge": settings.ROUND_LARGE}
    assert {name: named[name] for name in ours} == ours
    found = re.search(r"large_segment_size_\{(\d+)\}", text)
    assert found is not None
    assert int(found[1]) == settings.LARGE_SEGMENT


@pytest.mark.parametrize(("size", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_sizes_are_rounded_up_to_512_bytes(size: int, rounded: int):
    """round_size."""
    assert settings.rounded_size(size) == rounded
    assert CachingAllocator().malloc(size).size == rounded


@pytest.mark.parametrize(("size", "reserved"), [
    (1, 2 * MIB), (MIB, 2 * MIB),                     # small: kSmallBuffer
    (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB),  # below kMinLargeAlloc: large_segment_size
    (10 * MIB - 511, 10 * MIB),                       # rounds to 10 MiB, which is not below it
    (10 * MIB + 1, 12 * MIB), (12 * MIB, 12 * MIB),   # multiples of kRoundLarge
])
def test_segment_sizes(size: int, reserved: int):
    """get_allocation_size."""
    simulated = CachingAllocator()
    simulated.malloc(size)
    assert simulated.reserved == reserved

"""The allocator's sizes: what is rounded to what, and how large segments are."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tightfit.devices import MIB
from tightfit.planning.allocator import settings
from tightfit.planning.allocator.settings import AllocatorSettings
from tightfit.planning.allocator.simulator import CachingAllocator

KIB = 1024


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
    assert AllocatorSettings().rounded(size) == rounded
    assert CachingAllocator().malloc(size).size == rounded


@pytest.mark.parametrize(("size", "rounded"), [
    (3 * MIB + 1, 3584 * KIB),  # 2 to 4 MiB in four parts of 512 KiB
    (3 * MIB, 3 * MIB),
    (2048, 2048),               # not above 512 bytes times the parts: by 512
    (2049, 2560),               # 2 to 4 KiB in parts of 512 bytes
    (5000, 5120),               # 4 to 8 KiB in parts of 1 KiB
    (4 * MIB, 4 * MIB),         # powers of two stay
])
def test_roundup_power2_divisions(size: int, rounded: int):
    """round_size and roundup_power2_next_division."""
    assert AllocatorSettings(roundup_power2_divisions=(4,) * 16).rounded(size) == rounded


def test_roundup_power2_divisions_differ_by_interval():
    """AcceleratorAllocatorConfig::roundup_power2_divisions: entry 0 to below 2 MiB, entry 1 to below 4 MiB, 15 the
    rest."""
    divisions = (0, 2, *(0,) * 13, 8)
    ours = AllocatorSettings(roundup_power2_divisions=divisions)
    assert ours.rounded(2 * MIB - 511) == 2 * MIB  # entry 0: by 512
    assert ours.rounded(2 * MIB + 1) == 3 * MIB    # entry 1: two parts of 1 MiB
    assert ours.rounded(4 * MIB + 1) == 4 * MIB + 512
    assert ours.rounded((64 << 30) + 1) == 72 << 30  # entry 15: eight parts of 8 GiB
    assert ours.rounded((256 << 30) + 1) == 288 << 30


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


def test_large_segment_size_can_be_set():
    simulated = CachingAllocator(settings=AllocatorSettings(large_segment=40 * MIB))
    simulated.malloc(2 * MIB)
    assert simulated.reserved == 40 * MIB

"""The largest batch that fits, in few calls."""

from __future__ import annotations

import pytest

from tightfit.planning.largest import largest_that_fits

SIZES = [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize("base", [0, 100, 900])
@pytest.mark.parametrize("each", [1, 7, 100, 2000])
def test_finds_the_largest_of_an_affine_need(base, each):
    calls = []

    def needs(size):
        calls.append(size)
        return base + each * size

    fitting = [size for size in SIZES if base + each * size <= 1000]
    assert largest_that_fits(SIZES, needs, 1000) == (fitting[-1] if fitting else None)
    assert len(calls) == len(set(calls)) <= 4


def test_sizes_that_cannot_be_built_do_not_fit():
    assert largest_that_fits(SIZES, lambda size: float("inf") if size > 4 else 1.0, 10) == 4
    assert largest_that_fits([], lambda size: 0.0, 10) is None


@pytest.mark.parametrize(("each", "most", "tried"), [(1, 128, [128]), (20, 32, [128, 32, 64])])
def test_the_largest_first(each, most, tried):
    calls = []

    def needs(size):
        calls.append(size)
        return each * size

    assert largest_that_fits(SIZES, needs, 1000, largest_first=True) == most
    assert calls == tried


@pytest.mark.parametrize("most", [9, 66_000, 130_000])
@pytest.mark.parametrize("missing", [0, 1, 1 << 40])
def test_needs_that_say_nothing_of_the_distance_take_few_calls_too(most, missing):
    calls = []

    def needs(size):  # what fits by giving cached memory back takes all that there is
        calls.append(size)
        return 1000 if size <= most else 1000 + missing + size

    sizes = range(1, 131_072)
    assert largest_that_fits(sizes, needs, 1000) == most
    assert len(calls) <= 40

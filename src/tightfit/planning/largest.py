"""Largest size that fits a memory limit, by secant search, and the sizes to choose from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def halvings(size: int) -> list[int]:
    """The halves of a size, their halves, and so on down to 1, rounded down; ascending, without the size itself."""
    return [size >> times for times in range(size.bit_length() - 1, 0, -1)]


def largest_that_fits(
    sizes: Sequence[int], needs: Callable[[int], float], room: float, largest_first: bool = False
) -> int | None:
    """The largest of `sizes` that needs no more than `room`; None where not even the smallest does.

    sizes: ascending. needs: bytes at a size; it never falls from one size to a larger one, and each call is dear.
    largest_first: begin with the largest, which ends it where that fits, and not in the middle.

    Memory is nearly affine in the batch, so the line through the two nearest known sizes, or the origin, says where to
    look next: two or three calls where bisection makes more. Where three calls in a row leave more than half of what
    was open, as past a size that lacks another memory too, the next one bisects.
    """
    points = {0: 0.0}
    low, high = -1, len(sizes)  # positions of the largest that fits and of the smallest that does not
    slow = 0
    while high - low > 1:
        at, spread = high - 1 if largest_first and len(points) == 1 else (low + high) // 2, high - low
        finite = [size for size, needed in points.items() if needed < math.inf]
        near = sorted(finite, key=lambda size: (not size, abs(size - sizes[at])))[:2]
        if len(near) == 2 and points[near[0]] != points[near[1]] and slow < 3:
            x, u = near
            reached = x + (room - points[x]) * (u - x) / (points[u] - points[x])
            at = max((place for place in range(low + 1, high) if sizes[place] <= reached), default=low + 1)
        points[sizes[at]] = needs(sizes[at])
        low, high = (at, high) if points[sizes[at]] <= room else (low, at)
        slow = slow + 1 if 2 * (high - low) > spread else 0
    return sizes[low] if low >= 0 else None

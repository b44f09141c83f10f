"""The largest batch that fits: one search, for whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def largest_that_fits(
    sizes: Sequence[int], needs: Callable[[int], float], room: float, known: dict[int, float] | None = None
) -> int | None:
    """The largest of `sizes` that needs no more than `room`; None where not even the smallest does.

    sizes: ascending. needs: bytes at a size; it never falls from one size to a larger one, and each call is dear.
    known: what is known of some sizes already, by size; filled with what is learned.

    Memory is nearly affine in the batch, so the line through the two nearest known sizes says where to look next: two
    or three calls where bisection makes more.
    """
    asked: dict[int, float] = {} if known is None else known
    low, high = -1, len(sizes)  # positions of the largest that fits and of the smallest that does not
    for at, size in enumerate(sizes):
        if size in asked:
            low, high = (at, high) if asked[size] <= room else (low, min(high, at))
    while high - low > 1:
        at = min(max(_guess(sizes, asked, room, low, high), low + 1), high - 1)
        asked[sizes[at]] = needs(sizes[at])
        low, high = (at, high) if asked[sizes[at]] <= room else (low, at)
    return sizes[low] if low >= 0 else None


def _guess(sizes: Sequence[int], asked: dict[int, float], room: float, low: int, high: int) -> int:
    """The position to look at next: by the line through the two known sizes nearest to the gap; else its middle."""
    middle = (low + high) // 2
    known = sorted(asked, key=lambda size: abs(size - sizes[middle]))[:2]
    if len(known) < 2 or asked[known[0]] == asked[known[1]]:
        return middle
    (x, y), (u, v) = ((size, asked[size]) for size in known)
    reached = x + (room - y) * (u - x) / (v - y)
    return max((at for at in range(low + 1, high) if sizes[at] <= reached), default=low + 1)

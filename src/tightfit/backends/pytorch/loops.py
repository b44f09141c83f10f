"""Loops over tokens whose turns are alike: over chunks of a loss, over tiles of a feed-forward part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def turns(starts: Sequence[int]) -> Iterable[int]:
    """The rows at which the turns of a loop start. A plan puts another function here, which goes through a few of
    them."""
    return starts


def equal_turns(rows: int, most: int) -> tuple[Sequence[int], int]:
    """The rows at which turns of at most `most` rows start, as few as there can be, and how many rows each takes."""
    size = max(-(-rows // max(-(-rows // most), 1)), 1)
    return range(0, rows, size), size

"""Train and evaluation split of the documents."""

from __future__ import annotations

import numpy as np

from tightfit.tasks import Array


def held_out(documents: int, fraction: float) -> Array:
    """Bool (documents,): True where a document is held out.

    The share is exact up to rounding, with at least one document on each side where there are two or more, and the
    choice depends on nothing but the documents' positions.
    """
    chosen = np.zeros(documents, dtype=bool)
    if fraction == 0.0 or documents < 2:
        return chosen
    wanted = min(max(round(documents * fraction), 1), documents - 1)
    chosen[np.argsort(_scatter(np.arange(documents, dtype=np.uint64)), kind="stable")[:wanted]] = True
    return chosen


def _scatter(x: Array) -> Array:
    """A hash of 64-bit integers (the finalizer of SplitMix64)."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def split_text(text: str, fraction: float) -> tuple[str, str]:
    """A single document's beginning, to train on, and its end, to hold out; cut behind a line or a word if it can be.

    The two together are the text; the end has at least one character where the text has two.
    """
    cut = min(max(round(len(text) * (1.0 - fraction)), 1), len(text) - 1)
    for mark in ("\n", " "):
        found = text.rfind(mark, cut - cut // 10, cut) + 1
        if found > 0:
            return text[:found], text[found:]
    return text[:cut], text[cut:]

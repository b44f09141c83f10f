"""Masked language modelling's noise: deterministic, in the published shares, and never on special tokens."""

from __future__ import annotations

import numpy as np

from tightfit.data.samples import Masking
from tightfit.tasks import IGNORE

MASKING = Masking(mask_id=2, vocab_size=1000, special_ids=(0, 1, 2), seed=7)


def ordinary_ids(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, 1000, count)


def test_the_same_sample_is_hidden_alike_and_others_are_not() -> None:
    ids = ordinary_ids(200)
    first = MASKING.apply(ids, epoch=1, sample=5)
    again = MASKING.apply(ids, epoch=1, sample=5)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    for epoch, sample in ((2, 5), (1, 6)):
        assert not np.array_equal(first[1], MASKING.apply(ids, epoch=epoch, sample=sample)[1])


def test_shares_are_15_percent_and_80_10_10() -> None:
    ids = ordinary_ids(200)
    kept = masked = changed = chosen = 0
    for sample in range(400):
        shown, labels = MASKING.apply(ids, epoch=0, sample=sample)
        counts = labels != IGNORE
        assert np.array_equal(labels[counts], ids[counts])
        assert np.array_equal(shown[~counts], ids[~counts])
        assert counts.sum() == 30
        chosen += 30
        masked += int((shown[counts] == 2).sum())
        kept += int((shown[counts] == ids[counts]).sum())
        changed += int(((shown[counts] != 2) & (shown[counts] != ids[counts])).sum())
    # 12,000 choices: four standard deviations are 1.5 % of them at 80 %, 1.1 % at 10 %.
    assert abs(masked / chosen - 0.8) < 0.015
    assert abs(kept / chosen - 0.1) < 0.011
    assert abs(changed / chosen - 0.1) < 0.011


def test_special_tokens_are_never_chosen() -> None:
    ids = np.array([1, 5, 0, 0, 0, 6, 1])
    for sample in range(50):
        _, labels = MASKING.apply(ids, epoch=0, sample=sample)
        assert set(np.flatnonzero(labels != IGNORE)) <= {1, 5}
        assert (labels != IGNORE).sum() == 1  # at least one, however short
    shown, labels = MASKING.apply(np.array([0, 1]), epoch=0, sample=0)
    assert shown.tolist() == [0, 1]
    assert (labels == IGNORE).all()

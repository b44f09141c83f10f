"""Masked language modelling's noise: which tokens are hidden, as a pure function of seed, epoch and sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tightfit.tasks import IGNORE, Array

CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1
"""Share of the tokens to predict; of those, the shares shown as the mask and as a random token (the rest is shown)."""


def generator(*key: int) -> np.random.Generator:
    """Random numbers that are a pure function of the integers given."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Hides tokens (Devlin et al. 2019, https://arxiv.org/abs/1810.04805, section 3.1)."""

    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...]
    seed: int

    def apply(self, ids: Array, epoch: int, sample: int, first: int = 0) -> tuple[Array, Array]:
        """Model inputs and labels, both int64 (T,), for one sample's `ids`.

        Of the ordinary tokens from position `first` on, 15 % are chosen, rounded and at least one.
        """
        random = generator(self.seed, epoch, sample)
        eligible = np.flatnonzero(~np.isin(ids, self.special_ids))
        eligible = eligible[eligible >= first]
        labels = np.full(len(ids), IGNORE, dtype=np.int64)
        shown = ids.copy()
        if not len(eligible):
            return shown, labels
        chosen = random.choice(eligible, size=max(round(CHOSEN * len(eligible)), 1), replace=False, shuffle=False)
        labels[chosen] = ids[chosen]
        fate = random.random(len(chosen))
        replacement = random.integers(0, self.vocab_size, len(chosen))
        shown[chosen] = np.where(
            fate < MASKED, self.mask_id, np.where(fate < MASKED + RANDOM, replacement, ids[chosen])
        )
        return shown, labels

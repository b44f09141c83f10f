"""The random states that checkpointing keeps: tensors in host memory, which count where that is the device's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.trace import Category


@contextmanager
def counted_random_states(tracker: Tracker) -> Iterator[None]:
    """Tell the tracker of every copy of the host's random state: the generator makes it without asking the dispatcher.

    One for each region in the forward pass, to recompute with, and one while it is recomputed.
    """
    take = torch.get_rng_state

    def told() -> Tensor:
        state = take()
        tracker.mark(state, Category.OTHER, from_birth=True)
        return state

    torch.get_rng_state = told
    try:
        yield
    finally:
        torch.get_rng_state = take

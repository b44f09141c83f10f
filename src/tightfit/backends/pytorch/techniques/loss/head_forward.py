"""A head's forward pass that a loss over hidden states takes part in."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from torch import Tensor, nn


class HeadForward:
    """The head's forward pass, which can hand its input out instead, and be lent for other work.

    taking: where the inputs handed out go, and of how many tokens the model sees logits all the same; None while none
        are handed out. It belongs to a forward pass: several may be under way, each in a context of its own.
    """

    def __init__(self, head: nn.Linear) -> None:
        self._own = head.forward
        self.taking: ContextVar[tuple[list[Tensor], int] | None] = ContextVar("taking", default=None)

    def uses_weights(self, arguments: int) -> bool:
        """Whether a call with so many arguments reads the head's weights, and does not hand its input out alone."""
        taking = self.taking.get()
        return arguments > 1 or taking is None or taking[1] > 0

    def __call__(self, hidden: Tensor, work: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        if work is not None:
            return work(hidden)
        taking = self.taking.get()
        if taking is None:
            return self._own(hidden)
        taken, shown = taking
        taken.append(hidden)
        if shown:  # so many tokens' logits, for the model to do with as it does
            return self._own(hidden[:1, :shown])
        return hidden.detach()[:1, :1, :1]

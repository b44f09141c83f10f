"""A micro-batch's loss: a sum over the labels that count, from the model's logits or from what it makes them of."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.tasks import IGNORE

if TYPE_CHECKING:
    from tightfit.backends.pytorch.build import Build


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy, in fp32 or the logits' own format where that is wider.

    logits: (..., classes). labels: int64 (...), `IGNORE` where nothing counts. Returns a scalar.
    """
    logits = logits.flatten(0, -2)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


class Loss(Protocol):
    """The loss over (the model's outputs, its head), in two steps, so that what a model owes can be checked between."""

    def outputs(self, build: Build, batch: TensorBatch) -> Tensor:
        """Input of the loss, one row for each label: logits, or hidden states. Raises ModelError."""

    def classes(self, build: Build, outputs: Tensor) -> int:
        """How many classes a label may name."""

    def total(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The summed cross-entropy of the labels that count, a scalar."""

    def check(self, build: Build, batch: TensorBatch) -> None:
        """Compare with the model's own logits, on its first micro-batch. Raises ModelError where they differ."""


class LossOfLogits:
    """The loss of whole logits. See `Loss` for what each method promises."""

    def outputs(self, build: Build, batch: TensorBatch) -> Tensor:
        return build.logits(batch)

    def classes(self, build: Build, outputs: Tensor) -> int:
        return outputs.shape[-1]

    total = staticmethod(cross_entropy_sum)

    def check(self, build: Build, batch: TensorBatch) -> None:
        """Nothing to compare: they are the model's own."""


LOSS_OF_LOGITS = LossOfLogits()


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

"""A micro-batch's loss: a sum over the labels that count, from the model's logits or from what it makes them of."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.tasks import IGNORE

if TYPE_CHECKING:
    from tightfit.backends.pytorch.build import Build


class Tally:
    """Counts of an evaluation, on the device: how often the largest logit is the label's.

    correct: int64, a scalar. by_class: int64 (3, classes), how often each class was predicted rightly, was the label,
    and was predicted; None where a sample has no class, or nothing was counted yet.
    """

    def __init__(self, device: torch.device, classes: bool) -> None:
        self.correct = torch.zeros((), dtype=torch.int64, device=device)
        self.by_class: Tensor | None = None
        self._classes = classes

    def __call__(self, logits: Tensor, labels: Tensor) -> None:
        """Count some rows. logits: (N, classes), or what has its largest at the same place. labels: int64 (N,)."""
        predicted = logits.argmax(-1)
        right = predicted == labels  # no class is `IGNORE`
        self.correct += right.sum()
        if not self._classes:
            return
        if self.by_class is None:
            self.by_class = self.correct.new_zeros(3, logits.shape[-1])
        counted = labels != IGNORE
        for row, classes, chosen in zip(self.by_class, (predicted, labels.clamp(min=0), predicted),
                                        (right, counted, counted), strict=True):
            row.index_add_(0, classes, chosen.long())


def cross_entropy_sum(logits: Tensor, labels: Tensor, tally: Tally | None = None, smoothing: float = 0.0) -> Tensor:
    """Summed cross-entropy, in fp32 or the logits' own format where that is wider.

    logits: (..., classes). labels: int64 (...), `IGNORE` where nothing counts. tally: sees the logits first, while
    there is no copy of them. smoothing: share of each label that is spread over all classes. Returns a scalar.
    """
    logits = logits.flatten(0, -2)
    if tally is not None:
        tally(logits, labels.flatten())
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""torch.compile with its arguments."""


class Loss:
    """The loss over (the model's outputs, its head), in two steps, so that what a model owes can be checked between:
    here that of whole logits."""

    def outputs(self, build: Build, batch: TensorBatch) -> Tensor:
        """Input of the loss, one row for each label: logits, or hidden states. Raises ModelError."""
        return build.logits(batch)

    def classes(self, build: Build, outputs: Tensor) -> int:
        """The number of classes that a label may name."""
        return outputs.shape[-1]

    total = staticmethod(cross_entropy_sum)
    """The summed cross-entropy of the labels that count, a scalar. A frame more would hold on to whole logits."""

    def takes_input(self, module: nn.Module, arguments: int) -> bool:
        """Whether a call of a module with so many arguments only hands its input over to the loss, and reads no
        weights."""
        return False

    def check(self, build: Build, batch: TensorBatch) -> None:
        """Compare with the model's own logits, on its first micro-batch. Raises ModelError where they differ."""

    def compiled(self, compiler: Compiler) -> Loss:
        """The same loss, with what it makes of logits compiled: read in their own format, and no fp32 copy kept."""
        return _CompiledLoss(compiler)


class _CompiledLoss(Loss):
    """The loss of whole logits, compiled but for an evaluation's counts, which read the logits first."""

    def __init__(self, compiler: Compiler) -> None:
        self._plain, self._smoothed = compiler(_plain_sum), compiler(_smoothed_sum)

    def total(self, logits: Tensor, labels: Tensor, tally: Tally | None = None, smoothing: float = 0.0) -> Tensor:
        if tally is not None:
            tally(logits.flatten(0, -2), labels.flatten())
        made: Tensor = self._smoothed(logits, labels, smoothing) if smoothing else self._plain(logits, labels)
        return made


def _plain_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy_sum(logits, labels)


def _smoothed_sum(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Another function than evaluation's, for a compiler takes an argument's second value for one of many."""
    return cross_entropy_sum(logits, labels, None, smoothing)


LOSS_OF_LOGITS = Loss()
FAR_LOGIT = 50.0
"""Logits of this size show what is done to them, such as a softcap, which leaves small ones nearly as they are."""


def far_logits(product: Tensor) -> Tensor:
    """The product of a head, (B, T, V), with logits from -FAR to FAR in place of those of the second half's tokens."""
    found = product.clone()
    far = found[:, product.shape[1] // 2 :]
    far.copy_(torch.linspace(-FAR_LOGIT, FAR_LOGIT, product.shape[-1], device=product.device).expand_as(far))
    return found


class HeadForward:
    """The head's forward pass, which can hand its input out instead, and be lent for other work.

    taking: where the inputs handed out go, and of how many tokens the model sees logits all the same; None while none
        are handed out. It belongs to a forward pass: several may be under way, each in a context of its own.
    """

    def __init__(self, head: nn.Linear) -> None:
        self._own = head.forward
        self.taking: ContextVar[tuple[list[Tensor], int] | None] = ContextVar("taking", default=None)

    def hands_out(self, arguments: int) -> bool:
        """Whether a call with so many arguments only hands its input out, and reads no weights."""
        taking = self.taking.get()
        return arguments == 1 and taking is not None and taking[1] == 0

    def __call__(self, hidden: Tensor, work: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        if work is not None:
            return work(hidden)
        taking = self.taking.get()
        if taking is None:
            return self._own(hidden)
        taken, shown = taking
        taken.append(hidden)
        if shown:  # so many tokens' logits, for the model to do with as it does; a graph shows with which weights
            far = far_logits(self._own(hidden[:1, :shown]))
            torch.set_grad_enabled(True)
            return far.requires_grad_().clone()
        return hidden.detach()[:1, :1, :1]

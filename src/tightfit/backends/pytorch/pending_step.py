"""A step's figures, on their way from the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tightfit.backends.base import StepResult, Total

if TYPE_CHECKING:
    from tightfit.backends.pytorch.techniques.experts.routing import Routing

NOT_CLIPPED = -1.0
"""Placeholder for a gradient norm where none was taken."""


@dataclass(frozen=True)
class PendingStep:
    """A step's figures, on their way from the device.

    figures: summed loss, the gradient norm before clipping or `NOT_CLIPPED`, and those of `routing`; in host memory
        where they are still to arrive.
    scaled: whether the loss was scaled, so that gradients that are not finite only skipped the step.
    arrived: what to wait for before reading; None where they are there already.
    """

    figures: Tensor | list[float]
    count: int
    scaled: bool
    routing: Routing | None = None
    arrived: torch.cuda.Event | None = None

    def ready(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def read(self) -> StepResult:
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm, *more = self.figures.tolist() if isinstance(self.figures, Tensor) else self.figures
        return StepResult(
            loss=Total(loss, self.count),
            grad_norm=None if norm == NOT_CLIPPED else norm,
            skipped=self.scaled and not math.isfinite(norm),
            metrics={} if self.routing is None else self.routing.metrics(more),
        )

"""A step's figures, on their way from the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.backends.base import Metric, StepResult
from tightfit.metrics import Total

Metrics = Callable[[list[float]], dict[str, Metric]]
"""Reads a model's own figures of a step."""

NOT_CLIPPED = -1.0
"""Placeholder for a gradient norm where none was taken."""


@dataclass(frozen=True)
class PendingStep:
    """Figures of one step.

    figures: summed loss, the gradient norm before clipping or `NOT_CLIPPED`, and what `metrics` reads; in host memory
        where they are still to arrive.
    scaled: whether the loss was scaled, so that gradients that are not finite only skipped the step.
    arrived: what to wait for before reading; None where they are there already.
    """

    figures: Tensor | list[float]
    count: int
    scaled: bool
    metrics: Metrics | None = None
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
            metrics={} if self.metrics is None else self.metrics(more),
        )

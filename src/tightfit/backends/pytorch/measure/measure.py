"""Measuring the training step by itself: a few real steps, whatever they learn. See `step_profiler` for how."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tightfit.backends import measuring
from tightfit.backends.base import PLAIN, Measurement
from tightfit.backends.pytorch.batch import TensorWindow
from tightfit.backends.pytorch.measure.step_profiler import StepProfiler
from tightfit.backends.pytorch.step import Step


def measure(
    step: Step, windows: Iterator[TensorWindow], plain: int = PLAIN, chrome_trace: Path | None = None
) -> Measurement:
    """As `tightfit.backends.measuring.measure`."""
    build = step.build
    return measuring.measure(step, StepProfiler(step), build.session(), windows, build.recipe.learning_rate, plain,
                             chrome_trace)

"""Measuring the training step by itself: a few real steps, whatever they learn. See `step_profiler` for how."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tightfit.backends.base import PLAIN, WARM_UP, Measurement
from tightfit.backends.pytorch.batch import TensorWindow
from tightfit.backends.pytorch.measuring.step_profiler import StepProfiler
from tightfit.backends.pytorch.step import Step
from tightfit.errors import DataError, ModelError, OutOfMemory, ReportError


def measure(
    step: Step, windows: Iterator[TensorWindow], plain: int = PLAIN, chrome_trace: Path | None = None
) -> Measurement:
    """Take WARM_UP + `plain` + 1 steps on `windows` and say what they took. The model learns from them.

    chrome_trace: where the profiler's trace of the last one goes, gzipped.
    Raises as the step does, StopIteration where there are fewer windows, ReportError where the last step could not be
    followed, each with what was measured until then; and OSError where the trace cannot be written.
    """
    rate = step.build.recipe.learning_rate
    profiler = StepProfiler(step)
    try:
        with step.build.session():
            for _ in range(WARM_UP):
                step(next(windows), rate).read()
            for _ in range(plain):
                with profiler.timed():
                    step(next(windows), rate)
            profiler.profiled(next(windows), rate)
        return profiler.measurement(chrome_trace)
    except (DataError, ModelError, OutOfMemory, ReportError) as error:
        raise type(error)(f"{error}; {profiler.so_far}") from error

"""Measurement of a few real steps, outside of a run. See each backend's `StepProfiler`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightfit.backends.base import TIMED_STEPS, WARM_UP, Backend
from tightfit.backends.measurements import Measurement


def measure(
    backend: Backend, step: Any, global_batches: Iterator[Any], timed_steps: int = TIMED_STEPS,
    chrome_trace: Path | None = None,
) -> Measurement:
    """Take WARM_UP + `timed_steps` + 1 steps of `step` on its own `global_batches` and say what they took. The model
    learns from them.

    chrome_trace: where the profiler's trace of the last one goes, gzipped.
    Raises as the step does, StopIteration where there are fewer global batches, ReportError where the last step could
    not be followed, and OSError where the trace cannot be written.
    """
    build, profiler = step.build, backend.step_profiler(step)
    rate = build.recipe.learning_rate
    with build.process_settings():
        for _ in range(WARM_UP):
            step(next(global_batches), rate).read()
        for _ in range(timed_steps):
            with profiler.timed():
                step(next(global_batches), rate)
        profiler.profiled(next(global_batches), rate)
    return profiler.measurement(chrome_trace)

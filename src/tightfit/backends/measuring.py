"""Measurement of a few real steps, outside of a run. See each backend's `StepProfiler`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tightfit.backends.base import PLAIN, WARM_UP, Backend, Measurement
from tightfit.errors import DataError, ModelError, OutOfMemory, ReportError


def measure(
    backend: Backend, step: Any, global_batches: Iterator[Any], plain: int = PLAIN, chrome_trace: Path | None = None
) -> Measurement:
    """Take WARM_UP + `plain` + 1 steps of `step` on its own `global_batches` and say what they took. The model learns
    from them.

    chrome_trace: where the profiler's trace of the last one goes, gzipped.
    Raises as the step does, StopIteration where there are fewer global batches, ReportError where the last step could
    not be followed, each with what was measured until then; and OSError where the trace cannot be written.
    """
    build, profiler = step.build, backend.step_profiler(step)
    rate = build.recipe.learning_rate
    try:
        with build.session():
            for _ in range(WARM_UP):
                step(next(global_batches), rate).read()
            for _ in range(plain):
                with profiler.timed():
                    step(next(global_batches), rate)
            profiler.profiled(next(global_batches), rate)
        return profiler.measurement(chrome_trace)
    except (DataError, ModelError, OutOfMemory, ReportError) as error:
        raise type(error)(f"{error}; {profiler.so_far}") from error


def plain_steps(seconds: Sequence[float]) -> str:
    """A sentence on the plain steps, where the profiled one fails. seconds: wall seconds of each."""
    if not seconds:
        return "nothing was measured"
    steps = f"{len(seconds)} plain steps" if len(seconds) > 1 else "a plain step"
    return f"measured until then: {steps}, {sorted(seconds)[len(seconds) // 2]:.3g} s at the median"

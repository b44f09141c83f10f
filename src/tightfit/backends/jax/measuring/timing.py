"""Steps timed one by one, as a ladder wants them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from tightfit.backends.base import Timings
from tightfit.backends.jax.step import Step


def time_steps(step: Step, windows: Iterator[Any], warm_up: int, steps: int) -> Timings:
    """Take `warm_up` + `steps` + 1 steps; each of `steps` is timed from the end of the one before it, so that the wait
    for data counts. Memory on a processor is what XLA plans for the step."""
    seconds, losses = [], []
    for number in range(warm_up + steps + 1):
        begun = time.perf_counter()
        losses.append(step(next(windows), step.build.recipe.learning_rate).read().loss.mean)
        if warm_up <= number < warm_up + steps:
            seconds.append(time.perf_counter() - begun)
    peak = step.peak_memory() if step.build.device.kind == "cuda" else step.planned_memory()
    return Timings(seconds=tuple(seconds), losses=tuple(losses), peak_allocated=peak, peak_reserved=peak)

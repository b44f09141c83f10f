"""Measuring the training step: real steps, first as they are, then one with every op and every allocation followed.

The plain steps give wall seconds: of the wait for data, of each phase, of the whole. One more step runs under
torch.profiler, with a mark around every op that is dispatched; from that come what each op took, and, on the CPU, every
allocation. The marks and the profiler slow that step down, which the plain ones are there to tell; what an op took
on its device is not touched by it.

On CUDA allocations come from the allocator's own record, or where torch keeps none, from the tensors that live; its
own peak is given beside.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tightfit.backends.base import Measurement
from tightfit.backends.pytorch.batch import TensorWindow
from tightfit.backends.pytorch.compiled.planned_compile import compiled_modules
from tightfit.backends.pytorch.measuring import memory_history
from tightfit.backends.pytorch.measuring.events import measured_trace
from tightfit.backends.pytorch.measuring.marks import Marks
from tightfit.backends.pytorch.step import Step
from tightfit.trace import Phase

WARM_UP = 2
"""Steps before any is timed: the first makes the optimizer's states, compiles, and picks kernels."""
PLAIN = 5
"""Plain steps that are timed; the one of median length counts."""
PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""What a plain step's seconds are split into; recomputation is part of the backward phase."""


def measure(
    step: Step, windows: Iterator[TensorWindow], plain: int = PLAIN, chrome_trace: Path | None = None
) -> Measurement:
    """Take WARM_UP + `plain` + 1 steps on `windows` and say what they took. The model learns from them.

    chrome_trace: where the profiler's trace of the last one goes; gzipped where its name ends in `.gz`.
    Raises as the step does, and StopIteration where there are fewer windows.
    """
    build = step.build
    rate = build.recipe.learning_rate
    clock = _Clock(build.torch_device.type == "cuda")
    with build.session():
        for _ in range(WARM_UP):
            step(next(windows), rate).read()
        timed = [_plain(step, windows, rate, clock) for _ in range(plain)]
        window = next(windows)
        marks, profiler, seconds, peak, record = _marked(step, window, rate)
    wall, phases = sorted(timed, key=lambda each: each[0])[len(timed) // 2]
    if chrome_trace is not None:
        profiler.export_chrome_trace(str(chrome_trace))
    changes = None if record is None else memory_history.changes(record)
    trace = measured_trace(marks, profiler.profiler.kineto_results, changes)
    with_data = seconds + phases[Phase.DATA]
    return Measurement(
        trace=trace, step_seconds=wall, phase_seconds=phases, overhead=with_data / wall if wall else 1.0,
        peak_bytes=trace.peak()[1] if peak is None else peak, memory_record=record,
    )  # fmt: skip


def _plain(
    step: Step, windows: Iterator[TensorWindow], rate: float, clock: _Clock
) -> tuple[float, dict[Phase, float]]:
    """Wall seconds of a step, and of each of its phases, a window's micro-batches together."""
    clock.begin()
    began = time.perf_counter()
    window = next(windows)
    step.watch, before = clock.enter, step.watch
    try:
        pending = step(window, rate)
        clock.enter(None)
        pending.read()
    finally:
        step.watch = before
    return time.perf_counter() - began, clock.read()


def _marked(
    step: Step, window: TensorWindow, rate: float
) -> tuple[Marks, Any, float, int | None, dict[str, Any] | None]:
    """A step under the profiler with its ops marked: the marks, the profiler, the step's seconds, and the
    allocator's peak and record, where it has them."""
    build = step.build
    cuda = build.torch_device.type == "cuda"
    recorded = cuda and memory_history.available()
    marks = Marks(build, step.optimizer, memory_history.word) if recorded else Marks(build, step.optimizer)
    record = None
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    held = torch.cuda.memory_allocated() if cuda else None
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        with ExitStack() as stack:
            profiler = stack.enter_context(profile(activities=activities, profile_memory=not cuda))
            stack.enter_context(marks.following(build.model, compiled_modules(build), held))
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            if recorded:
                stack.enter_context(memory_history.recorded())
            step.watch, before = marks.enter, step.watch
            began = time.perf_counter()
            try:
                step(window, rate).read()
            finally:
                step.watch = before
                marks.close()
            seconds = time.perf_counter() - began
            peak = torch.cuda.max_memory_allocated() if cuda else None
            record = memory_history.snapshot() if recorded else None
    finally:
        if enabled:
            gc.enable()
    return marks, profiler, seconds, peak, record


class _Clock:
    """When each phase of a step begins, on the device's own clock. On CUDA the device is not waited for in between."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._began = self._got = 0.0
        self._marks: list[tuple[Phase | None, Any]] = []

    def begin(self) -> None:
        """A step begins with its wait for a window."""
        if self._cuda:
            torch.cuda.synchronize()
        self._marks = []
        self._began = time.perf_counter()

    def enter(self, phase: Phase | None) -> None:
        """A phase begins; None for the end of the last one."""
        if not self._marks:
            self._got = time.perf_counter()
        self._marks.append((phase, self._now()))

    def read(self) -> dict[Phase, float]:
        """Seconds of each phase."""
        found = dict.fromkeys(PHASES, 0.0)
        found[Phase.DATA] = self._got - self._began
        for (phase, start), (_, stop) in zip(self._marks, self._marks[1:], strict=False):
            assert phase is not None
            found[phase] += start.elapsed_time(stop) / 1000 if self._cuda else stop - start
        return found

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

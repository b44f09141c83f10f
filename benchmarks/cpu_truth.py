"""What a real step on the CPU allocates, by torch.profiler's own allocation events."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from tightfit.backends.pytorch.assembly import assemble
from tightfit.backends.pytorch.batch import TensorGlobalBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.step import Step
from tightfit.devices import Device
from tightfit.recipe import Recipe
from tightfit.trace import Phase

PHASES = ("forward", "backward", "optimizer")
STEPS = 2
MARK = "phase of a step: "


def measured_peaks(
    recipe: Recipe, device: Device, global_batches: Callable[[Build], Iterable[TensorGlobalBatch]],
    model: Callable[[], nn.Module] | None = None,
) -> dict[str, int]:
    """The most bytes allocated at once in the forward, backward and optimizer phases of the first two steps.

    Counted from the construction of the model on, so that weights are in them. global_batches: two global batches,
    made outside of the count: data shares numpy's memory.
    """
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            build = assemble(recipe, device, torch.device("cpu"), None if model is None else model())
            phases = _Phases()
            step = Step(build, watch=phases.enter, inspect=False)
            made = global_batches(build)
            with build.session():
                for global_batch in made:
                    step(global_batch, recipe.learning_rate)
                    phases.close()
    finally:
        gc.enable()
    return _peaks(profiler.profiler.kineto_results.events())


class _Phases:
    """Marks each phase of a step in the profile."""

    def __init__(self) -> None:
        self._open: Any = nullcontext()

    def enter(self, phase: Phase) -> None:
        self.close()
        self._open = record_function(MARK + phase.value)
        self._open.__enter__()

    def close(self) -> None:
        self._open.__exit__(None, None, None)
        self._open = nullcontext()


def _peaks(events: Iterable[Any]) -> dict[str, int]:
    """From the profiler's events: the peak of the running sum inside each phase's marks."""
    changes: list[tuple[int, int, int]] = []
    marks: list[tuple[int, int, str]] = []
    for event in events:
        name = event.name()
        if name == "[memory]":
            changes.append((event.start_ns(), len(changes), event.nbytes()))
        elif name.startswith(MARK):
            start = event.start_ns()
            marks.append((start, start + event.duration_ns(), name.removeprefix(MARK)))
    changes.sort()
    marks.sort()
    peaks = dict.fromkeys(PHASES, 0)
    live, at = 0, 0
    for start, stop, phase in marks:
        while at < len(changes) and changes[at][0] < start:
            live += changes[at][2]
            at += 1
        peaks[phase] = max(peaks[phase], live)
        while at < len(changes) and changes[at][0] <= stop:
            live += changes[at][2]
            peaks[phase] = max(peaks[phase], live)
            at += 1
    return peaks

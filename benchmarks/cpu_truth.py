"""What really running something on the CPU allocates, by torch.profiler's own allocation events."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_truth import held_bytes
from tightfit.backends.pytorch.assembly import assemble
from tightfit.backends.pytorch.batch import TensorGlobalBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.step import Step
from tightfit.devices import Device
from tightfit.recipe import Recipe

PHASES = ("forward", "backward", "optimizer")
STEPS = 2
MARK = "tightfit: "


class Allocations:
    """Records what is allocated on the CPU while it is entered, without Python's garbage collection."""

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._part = ExitStack()

    def __enter__(self) -> Allocations:
        gc.collect()
        gc.disable()
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.begin(None)
        self._profiler.__exit__(*error)
        gc.enable()

    def begin(self, part: str | None) -> None:
        """What comes from here on is of that part, or of none."""
        self._part.close()
        if part is not None:
            self._part.enter_context(record_function(MARK + part))

    def held(self) -> int:
        """Bytes allocated at the end, beyond those at the beginning."""
        return sum(size for _, size in self._changes())

    def peaks(self) -> dict[str, int]:
        """The most bytes allocated at once in each part, however often it came."""
        changes = self._changes()
        peaks: dict[str, int] = {}
        live, at = 0, 0
        for start, stop, part in self._parts():
            while at < len(changes) and changes[at][0] < start:
                live += changes[at][1]
                at += 1
            peaks[part] = max(peaks.get(part, 0), live)
            while at < len(changes) and changes[at][0] <= stop:
                live += changes[at][1]
                peaks[part] = max(peaks[part], live)
                at += 1
        return peaks

    def _changes(self) -> list[tuple[int, int]]:
        """Time and bytes of every allocation and release."""
        found = [(event.start_ns(), event.nbytes()) for event in self._events() if event.name() == "[memory]"]
        return sorted(found, key=lambda change: change[0])

    def _parts(self) -> list[tuple[int, int, str]]:
        return sorted((event.start_ns(), event.start_ns() + event.duration_ns(), event.name().removeprefix(MARK))
                      for event in self._events() if event.name().startswith(MARK))

    def _events(self) -> Iterable[Any]:
        profiler: Any = self._profiler.profiler
        found: Iterable[Any] = profiler.kineto_results.events()
        return found


def measured_peaks(
    recipe: Recipe, device: Device, global_batches: Callable[[Build], Iterable[TensorGlobalBatch]],
    model: Callable[[], nn.Module] | None = None,
) -> dict[str, int]:
    """The most bytes allocated at once in the forward, backward and optimizer phases of the first two steps.

    Counted from the construction of the model on, so that weights are in them. global_batches: two global batches,
    made outside of the count: data shares numpy's memory.
    """
    with Allocations() as allocations:
        build = assemble(recipe, device, torch.device("cpu"), None if model is None else model())
        step = Step(build, watch=lambda phase: allocations.begin(phase.value), inspect=False)
        made = global_batches(build)
        with build.process_settings():
            for global_batch in made:
                step(global_batch, recipe.learning_rate)
                allocations.begin(None)
    return dict.fromkeys(PHASES, 0) | allocations.peaks()


def inference_peaks(
    model: nn.Module, run: Callable[[], object], context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> dict[str, int]:
    """The most bytes alive at once in the model's first forward pass of `run` with what surrounds it (`prefill`), and
    in all later ones (`decode`).

    context: what surrounds the whole run, such as autocast. The model's weights and buffers are counted.
    """
    passes = 0

    def begin(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes > 1:
            allocations.begin("decode")

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(begin).remove)
        allocations = stack.enter_context(Allocations())
        stack.enter_context(torch.no_grad())
        stack.enter_context(context())
        allocations.begin("prefill")
        run()
    held = held_bytes(chain(model.parameters(), model.buffers()))
    return {part: held + peak for part, peak in allocations.peaks().items()}

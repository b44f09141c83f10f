"""Measured cost of one recipe: memory at each phase, time of a step, whether it runs out of memory.

Run in a process of its own: its CUDA context, its limit and its failures are its own. On the CPU only time and what
the tensors themselves tell are measured.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from random_global_batches import random_global_batch
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import TensorGlobalBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.errors import is_out_of_memory
from tightfit.backends.pytorch.measure.calibration.timing import host_seconds
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.techniques.optimizer.state import state_tensors
from tightfit.devices import Device
from tightfit.errors import OutOfMemory
from tightfit.nvml import NoNvml, driver_version, nvml_session
from tightfit.recipe import Recipe
from tightfit.trace import Phase

WARM_UP, SKIPPED, FEWEST, MOST = 3, 12, 3, 20
"""Steps before time is taken, in which memory is watched; how many more where loss scaling skips the first ones; and
steps that time is taken of."""
TIMED_SECONDS = 0.6
GLOBAL_BATCHES = 2
NO_MEMORY = "out of memory"
"""Texts of CUDA's own errors, when something outside of the allocator finds no room."""


def describe_device() -> dict[str, Any]:
    """The CUDA device's facts; call it in a child, since it makes a context. Raises Refused where there is none."""
    device = PytorchBackend().device(Recipe.from_dict({"device": "cuda"}))
    return {**facts_of(device), "driver": driver_version() or ""}


def host_now() -> dict[str, float]:
    """Seconds of this machine's host for an op, by phase: machines differ, and one does from hour to hour."""
    return host_seconds(torch.device("cuda"))


def cpu() -> Device:
    """This machine's processor, with the one thread that a measurement uses."""
    return replace(PytorchBackend().device(Recipe.from_dict({"device": "cpu"})), units=1)


def facts_of(device: Device) -> dict[str, Any]:
    """Identity of a device, as JSON holds it."""
    return {"kind": device.kind, "name": device.name, "memory_bytes": device.memory_bytes, "units": device.units,
            "capability": None if device.capability is None else list(device.capability)}


def measure(
    recipe: Recipe, device: Device, limit: int | None, *, expandable: bool = False, others: int | None = None
) -> dict[str, Any]:
    """Train a few steps and evaluate one micro-batch.

    recipe: resolved. limit: bytes that the allocator may reserve; None for no limit. others: bytes of the device in
    use before this process came, None where that is not known.
    """
    cuda = device.kind == "cuda"
    if cuda:
        _set_up(limit, expandable)
    else:
        torch.set_num_threads(1)  # a forked process cannot use its parent's threads
    meter = Meter(cuda)
    values: dict[str, Any] = {"outcome": "ran", "torch": torch.__version__}
    try:
        values |= _run(recipe, device, meter)
    except (OutOfMemory, RuntimeError) as error:
        if not isinstance(error, OutOfMemory) and not is_out_of_memory(error) and NO_MEMORY not in str(error):
            raise
        values |= {"outcome": "out of memory", "during": str(error)}
    return {**values, **meter.result(), **(context_bytes(others) if cuda else {})}


def _set_up(limit: int | None, expandable: bool) -> None:
    """The allocator's settings and its limit, before it is first asked."""
    settings = f"expandable_segments:{expandable}"
    os.environ["PYTORCH_ALLOC_CONF"] = settings
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    torch.cuda.init()
    if _has_expandable_segments() is not expandable:  # read before the fork
        torch.cuda.memory._set_allocator_settings(settings)
        assert _has_expandable_segments() is expandable, "the allocator did not take its settings"
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)


def _has_expandable_segments() -> bool:
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


def _run(recipe: Recipe, device: Device, meter: Meter) -> dict[str, Any]:
    backend = PytorchBackend()
    build = backend.build(recipe, device)
    global_batches = [random_global_batch(recipe, build.task, build.facts, seed) for seed in range(GLOBAL_BATCHES)]
    if device.kind == "cuda" and recipe.loading.pin_memory:
        global_batches = [global_batch.pin_memory() for global_batch in global_batches]
    step = Step(build, watch=meter.enter, inspect=False)
    meter.of(build, step)
    feed = cycle(global_batches)
    with build.process_settings():
        for number, global_batch in enumerate(islice(feed, WARM_UP + SKIPPED), 2):
            step(global_batch, recipe.learning_rate).read()
            meter.enter(None)
            if number >= WARM_UP and (not step.update.scaled or step.optimizer.state):
                break
        first = _timed(step, islice(feed, 1), recipe)[0]
        meter.enter(None)
        meter.on = False
        seconds = _timed(step, islice(feed, _count(first)), recipe)
        meter.on = True
        meter.enter(Phase.EVALUATION)
        step.evaluate([_first_micro_batch(global_batches[0])])
        meter.enter(Phase.SAVE)
        step.is_finite()
        meter.enter(None)
    return {
        "step_seconds": statistics.median(seconds), "steps": len(seconds), "fastest": min(seconds),
        "slowest": max(seconds), "compile_seconds": step.compile_seconds,
    }


def _count(seconds: float) -> int:
    """How many steps to time, where one takes so long."""
    return min(max(int(TIMED_SECONDS / max(seconds, 1e-6)), FEWEST), MOST)


def _timed(step: Step, global_batches: Iterable[TensorGlobalBatch], recipe: Recipe) -> list[float]:
    """Seconds of each step, one right after the other, as a run has them: nobody waits for the device in between."""
    cuda = step.build.torch_device.type == "cuda"
    marks: list[Any] = []

    def mark() -> None:
        if cuda:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())

    mark()
    for global_batch in global_batches:
        step(global_batch, recipe.learning_rate)
        mark()
    if cuda:
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
    return [b - a for a, b in pairwise(marks)]


def _first_micro_batch(global_batch: TensorGlobalBatch) -> TensorGlobalBatch:
    batch = global_batch.micro_batches[0]
    rows = batch.labels.shape[0]
    return TensorGlobalBatch(micro_batches=(batch,), count=rows, samples=rows, tokens=rows, origin=global_batch.origin)


class Meter:
    """The allocator's figures in each phase, and the bytes of what the step holds. on: whether to look at all."""

    def __init__(self, cuda: bool) -> None:
        self.on, self._cuda = True, cuda
        self._phase: Phase | None = None
        self._phases: dict[str, int] = {}
        self._most = {"peak_allocated": 0, "peak_reserved": 0}
        self._categories: dict[str, int] = {}
        self._step: Step | None = None
        self._forwards = 0
        self._before = 0

    def of(self, build: Build, step: Step) -> None:
        self._step = step
        self._categories["weights"] = held_bytes([*build.model.parameters(), *build.model.buffers()])

    def enter(self, phase: Phase | None) -> None:
        """Note what the phase that ends here took."""
        if not self.on:
            return
        if self._cuda:
            self._look()
        if phase is Phase.OPTIMIZER and self._step is not None:
            grads = [p.grad for p in self._step.build.model.parameters() if p.grad is not None]
            self._categories["gradients"] = held_bytes(grads)
        if self._phase is Phase.OPTIMIZER and self._step is not None:
            tensors, _ = state_tensors(self._step.optimizer, self._step.build.model)
            self._categories["optimizer"] = held_bytes(t for t in tensors.values() if t.device.type == self._kind)
        self._phase = phase

    @property
    def _kind(self) -> str:
        return "cuda" if self._cuda else "cpu"

    def _look(self) -> None:
        stats = torch.cuda.memory_stats()
        peak, now = (int(stats[f"allocated_bytes.all.{what}"]) for what in ("peak", "current"))
        if self._phase is not None:
            self._phases[self._phase.value] = max(self._phases.get(self._phase.value, 0), peak)
        if self._phase is Phase.FORWARD and "kept by forward" not in self._categories and self._forwards > 0:
            self._categories["kept by forward"] = now - self._before
        self._most["peak_allocated"] = max(self._most["peak_allocated"], peak)
        self._most["peak_reserved"] = max(self._most["peak_reserved"], int(stats["reserved_bytes.all.peak"]))
        self._before = now
        self._forwards += self._phase is Phase.OPTIMIZER  # the first step's passes have no states yet
        torch.cuda.reset_peak_memory_stats()

    def result(self) -> dict[str, Any]:
        values: dict[str, Any] = {"categories": self._categories}
        if not self._cuda:
            return values
        self._look()
        stats = torch.cuda.memory_stats()
        return {**values, **self._most, "phases": self._phases, "retries": int(stats["num_alloc_retries"]),
                "failures": int(stats["num_ooms"])}


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, shared memory once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def context_bytes(others: int | None) -> dict[str, Any]:
    """Bytes of the device outside of the allocator: what this process added, its context and kernels; where the driver
    does not tell what was there before it, all that there is."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    now = used_bytes()
    taken = total - free if others is None or now is None else now - others
    return {"context": taken - torch.cuda.memory_reserved(), "others": others}


def used_bytes(card: str | None = None) -> int | None:
    """Bytes of the device in use now, which the driver tells without a context; None where it cannot be asked. card:
    its UUID; by default the first that CUDA sees."""
    card = card or os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with suppress(NoNvml), nvml_session() as nvml:
        handle = (nvml.ask("nvmlDeviceGetHandleByIndex", int(card)) if card.isdecimal()
                  else nvml.ask("nvmlDeviceGetHandleByUUID", card))
        memory = None if handle is None else nvml.memory(handle)
        return None if memory is None else memory[1]
    return None

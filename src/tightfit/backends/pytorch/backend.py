"""The PyTorch backend: the device, the build, the step, the prediction.

What predicts and what measures is loaded when it is called: training needs neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tightfit.backends.base import absences
from tightfit.backends.pytorch.apply import ABSENT
from tightfit.backends.pytorch.assembly import assemble
from tightfit.backends.pytorch.batch import TensorGlobalBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.errors import memory_guard
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.world import alone, joined, not_started
from tightfit.backends.world import ERROR_SAID, LaunchedProcess, World, launched_process
from tightfit.devices import Device
from tightfit.errors import Refused, SaidElsewhere, TightfitError
from tightfit.recipe import Recipe
from tightfit.system import host_memory
from tightfit.techniques.parallel import ManyProcesses
from tightfit.trace import Trace, UntracedMemory

if TYPE_CHECKING:
    from tightfit.backends.measurements import ModelSize, Timings
    from tightfit.backends.pytorch.measure.step_profiler import StepProfiler


class PytorchBackend:
    """Trains with PyTorch. See `backends.base.Backend` for what each method promises."""

    def device(self, recipe: Recipe) -> Device:
        cuda = torch.cuda.is_available()
        if recipe.device == "cuda" and not cuda:
            raise Refused("device: 'cuda' was asked for, and torch finds no CUDA device; write device=cpu")
        if cuda and recipe.device != "cpu":
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            return Device(
                kind="cuda",
                name=properties.name,
                memory_bytes=properties.total_memory,
                capability=(properties.major, properties.minor),
                units=properties.multi_processor_count,
                uuid=f"GPU-{properties.uuid}",
            )
        return Device(kind="cpu", name="CPU", memory_bytes=host_memory().total, units=torch.get_num_threads())

    def world(self, recipe: Recipe) -> AbstractContextManager[World]:
        parallel, place = recipe.parallel, launched_process()
        if not isinstance(parallel, ManyProcesses):
            if place is not None and place.size > 1 and "WORLD_SIZE" in os.environ:  # srun starts other things as well
                raise _refused(place, f"parallel: {place.size} processes were started, and parallel={parallel.name} "
                                      "trains in one; write parallel=ddp, parallel=fsdp or parallel=zero, or start one")
            return alone()
        if place is None:
            raise not_started(parallel.name)
        if parallel.processes not in ("auto", place.size):
            raise _refused(place, f"parallel.processes: {parallel.processes}, and {place.size} were started; write "
                                  f"parallel.processes={place.size}, or leave it out")
        return joined(place, self.device(recipe).kind, parallel.timeout)

    def limit_memory(self, recipe: Recipe, memory_bytes: int) -> Device:
        device = self.device(recipe)
        if device.kind != "cuda" or device.memory_bytes < memory_bytes:
            raise Refused(f"gpu-memory: {memory_bytes / 2**30:.1f} GiB is a limit for a GPU that has as much, which "
                          f"{device.name} with {device.memory_bytes / 2**30:.1f} GiB is not; leave it out")
        from tightfit.backends.pytorch.gpu_memory import gpu_memory

        torch.ones(1, device="cuda")
        context = gpu_memory().context or 0
        torch.cuda.set_per_process_memory_fraction(max(memory_bytes - context, 0) / device.memory_bytes)
        return replace(device, memory_bytes=memory_bytes)

    def absences(self, recipe: Recipe) -> list[str]:
        return absences(recipe, ABSENT)

    def build(self, recipe: Recipe, device: Device, model: nn.Module | None = None, config: Any = None) -> Build:
        if device.kind == "cuda" and recipe.expandable_segments is True:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # before the first weight
        if recipe.deterministic:
            from tightfit.backends.pytorch.determinism import use_deterministic_matmuls  # for these alone

            use_deterministic_matmuls()
        with memory_guard(lambda: "building the model"):
            return assemble(recipe, device, torch.device(device.kind), model, config=config)

    def step(self, build: Build) -> Step:
        return Step(build)

    def predict(self, recipe: Recipe, device: Device, model: nn.Module | None = None) -> Trace:
        if recipe.mode == "train":
            from tightfit.backends.pytorch.simulate.processes import predict

            return predict(recipe, device, model)
        from tightfit.backends.pytorch.simulate.inference import predict_inference

        return predict_inference(recipe, device, model)

    def model_size(self, recipe: Recipe, config: Any = None) -> ModelSize:
        from tightfit.backends.pytorch.model_size import model_size

        return model_size(recipe, config)

    def step_profiler(self, step: Step) -> StepProfiler:
        from tightfit.backends.pytorch.measure.step_profiler import StepProfiler

        return StepProfiler(step)

    def time(self, step: Step, global_batches: Iterator[TensorGlobalBatch], warm_up: int, steps: int) -> Timings:
        from tightfit.backends.pytorch.measure.meter import Meter

        build = step.build
        meter = Meter(build.torch_device, warm_up=warm_up, steps=steps, seed=build.recipe.seed)
        with build.process_settings():
            meter.start()
            while not meter.done:
                meter.end(step(next(global_batches), build.recipe.learning_rate).read().loss.mean)
        return meter.read()

    def untraced(self, recipe: Recipe, device: Device, trace: Trace) -> list[UntracedMemory]:
        from tightfit.backends.pytorch.simulate.untraced import untraced

        return untraced(recipe, device, trace)


def _refused(place: LaunchedProcess, text: str) -> TightfitError:
    """The error of all of a launcher's processes, which the first of this machine's says."""
    return SaidElsewhere(text, ERROR_SAID) if place.local_rank else Refused(text)

"""Timing of steps on several devices."""

from __future__ import annotations

from dataclasses import replace

import torch

from tightfit.backends.base import GlobalBatchSource
from tightfit.backends.measurements import Timings
from tightfit.backends.pytorch.assembly import assemble
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.errors import memory_guard
from tightfit.backends.pytorch.measure.meter import Meter
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.techniques.parallel import dp
from tightfit.backends.pytorch.world import joined
from tightfit.backends.world import launched_process
from tightfit.devices import Device
from tightfit.recipe import Recipe
from tightfit.techniques.parallel import ManyProcesses


def cards(device: Device) -> int:
    """Number of GPUs that this process may use, if it is to use any."""
    return torch.cuda.device_count() if device.kind == "cuda" else 0


def time_in_one_process(recipe: Recipe, device: Device, source: GlobalBatchSource, warm_up: int, steps: int) -> Timings:
    """Steps of one process on all of its GPUs; the memory is that of the fullest.

    recipe: resolved, of one device.
    """
    meter = Meter(torch.device("cuda"), warm_up=warm_up, steps=steps, seed=recipe.seed)
    with memory_guard(lambda: "DataParallel"):
        _take_steps(dp(assemble(recipe, device, torch.device("cuda"))), source, meter)
    every = range(cards(device))
    return replace(
        meter.read(),
        peak_allocated=max(torch.cuda.max_memory_allocated(card) for card in every),
        peak_reserved=max(torch.cuda.max_memory_reserved(card) for card in every),
    )


def time_distributed(recipe: Recipe, device: Device, source: GlobalBatchSource, warm_up: int, steps: int) -> Timings:
    """Steps of this process, one of several that torchrun started, over NCCL on a GPU each, else over gloo; the memory
    is that of the fullest.

    recipe: resolved, with `parallel` named.
    """
    place, parallel = launched_process(), recipe.parallel
    assert place is not None
    assert isinstance(parallel, ManyProcesses)
    with joined(place, device.kind, parallel.timeout) as world:
        meter = Meter(torch.device(device.kind), warm_up=warm_up, steps=steps, seed=recipe.seed + world.rank)
        with memory_guard(lambda: f"process {world.rank} of {world.size}"):
            build = assemble(recipe, device, torch.device(device.kind))
            _take_steps(build, source, meter)
            found = _fullest(meter.read(), build)
        del build
    return found


def _take_steps(build: Build, source: GlobalBatchSource, meter: Meter) -> None:
    step = Step(build, inspect=False)  # looking into the model would pass by what wraps it
    global_batches = step.global_batches(source, 0, meter.total)
    with build.process_settings():
        meter.start()
        for global_batch in global_batches:
            meter.end(step(global_batch, build.recipe.learning_rate).read().loss.mean)


def _fullest(timings: Timings, build: Build) -> Timings:
    """Timings with the memory of the process that needed most."""
    peaks = [timings.peak_allocated, timings.peak_reserved, timings.context or 0]
    if build.torch_device.type == "cpu":
        # Buckets hold the gradients out of sight of the meter, which looks at Python's tensors.
        buckets = sum(p.nbytes for p in build.model.parameters() if p.requires_grad)
        peaks = [peaks[0] + buckets, peaks[1] + buckets, 0]
    allocated, reserved, context = (int(build.world.all_reduce_max(peak)) for peak in peaks)
    return replace(timings, peak_allocated=allocated, peak_reserved=reserved, context=context or None)

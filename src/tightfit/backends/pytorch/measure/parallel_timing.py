"""Timing of steps on several devices."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import torch
import torch.distributed as dist

from tightfit.backends.base import GlobalBatchSource, Timings, Total
from tightfit.backends.pytorch.assembly import assemble
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.errors import memory_guard
from tightfit.backends.pytorch.measure.meter import Meter
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.techniques.parallel import process_sums
from tightfit.devices import Device
from tightfit.recipe import Recipe


def cards(device: Device) -> int:
    """How many GPUs this process may use, if it is to use any."""
    return torch.cuda.device_count() if device.kind == "cuda" else 0


def time_in_one_process(recipe: Recipe, device: Device, source: GlobalBatchSource, warm_up: int, steps: int) -> Timings:
    """Steps of one process on all of its GPUs; the memory is that of the fullest.

    recipe: resolved, with `parallel` named.
    """
    meter = Meter(torch.device("cuda"), warm_up=warm_up, steps=steps, seed=recipe.seed)
    with memory_guard(lambda: "DataParallel"):
        _take_steps(assemble(recipe, device, torch.device("cuda"), on_several=True), source, meter)
    every = range(cards(device))
    return replace(
        meter.read(),
        peak_allocated=max(torch.cuda.max_memory_allocated(card) for card in every),
        peak_reserved=max(torch.cuda.max_memory_reserved(card) for card in every),
    )


def time_distributed(recipe: Recipe, device: Device, source: GlobalBatchSource, warm_up: int, steps: int) -> Timings:
    """Steps of this process, one of several that torchrun started, over NCCL on a GPU each, else over gloo; the memory
    is that of the fullest.

    recipe: resolved, with `parallel` named. source: this process's own part of every global batch.
    """
    rank = int(os.environ["RANK"])
    if device.kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device.kind == "cuda" else "gloo")
    meter = Meter(torch.device(device.kind), warm_up=warm_up, steps=steps, seed=recipe.seed + rank)
    with memory_guard(lambda: f"process {rank} of {dist.get_world_size()}"):
        build = assemble(recipe, device, torch.device(device.kind), on_several=True)
        _take_steps(build, source, meter)
        found = _fullest(meter.read(), build)
    del build
    gc.collect()  # the last to hold the group must not be DistributedDataParallel, which would end it without yielding
    dist.destroy_process_group()
    return found


def _take_steps(build: Build, source: GlobalBatchSource, meter: Meter) -> None:
    step = Step(build, inspect=False)  # looking into the model would pass by what wraps it
    global_batches = step.global_batches(source, 0, meter.total)
    with build.session():
        meter.start()
        for global_batch in global_batches:
            loss = step(global_batch, build.recipe.learning_rate).read().loss
            meter.end(_over_processes(loss, build).mean)


def _over_processes(total: Total, build: Build) -> Total:
    if not dist.is_initialized():
        return total
    loss, count = process_sums([total.sum, total.count], build.torch_device)
    return Total(loss, int(count))


def _fullest(timings: Timings, build: Build) -> Timings:
    """The same with the memory of the process that needed most."""
    peaks = [timings.peak_allocated, timings.peak_reserved, timings.context or 0]
    if build.torch_device.type == "cpu":
        # Buckets hold every gradient once more, out of sight of the meter, which looks at Python's tensors.
        buckets = sum(p.nbytes for p in build.model.parameters() if p.requires_grad)
        peaks = [peaks[0] + buckets, peaks[1] + buckets, 0]
    highest = torch.tensor(peaks, device=build.torch_device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    allocated, reserved, context = highest.tolist()
    return replace(timings, peak_allocated=allocated, peak_reserved=reserved, context=context or None)

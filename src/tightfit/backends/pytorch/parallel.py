"""The training step on several devices, by torch's DataParallel and DistributedDataParallel around the same build.

However a window is split, the loss of a step is the sum over all of its labels, divided by their number.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tightfit.backends.base import Timings, Total, WindowSource
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import TensorBatch, TensorWindow
from tightfit.backends.pytorch.build import Build, LossSum
from tightfit.backends.pytorch.measuring.meter import Meter
from tightfit.backends.pytorch.out_of_memory import memory_guard
from tightfit.backends.pytorch.step import Step
from tightfit.devices import Device
from tightfit.recipe import Recipe


class LossModule(nn.Module):
    """A micro-batch's summed loss, (1,), made where the micro-batch is: logits would have to travel."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.model = build.model
        self._build = build

    def forward(self, **fields: Any) -> Tensor:
        """fields: of a TensorBatch."""
        build = replace(self._build, model=self.model)  # DataParallel calls copies of this module
        return build.loss_sum(TensorBatch(**fields))[None]


def cards(device: Device) -> int:
    """How many GPUs this process may use, if it is to use any."""
    return torch.cuda.device_count() if device.kind == "cuda" else 0


def time_data_parallel(
    recipe: Recipe, device: Device, source: WindowSource, warm_up: int, steps: int, devices: int
) -> Timings:
    """Steps of one process on `devices` GPUs: each micro-batch is cut into as many, and the model copied, anew."""
    meter = Meter(torch.device("cuda"), warm_up=warm_up, steps=steps, seed=recipe.seed)
    with memory_guard(lambda: "DataParallel"):
        build = PytorchBackend().build(recipe, device)
        wrapped = DataParallel(LossModule(build), device_ids=list(range(devices)))
        _take_steps(replace(build, shared_loss=_loss_of(wrapped)), source, meter)
    return replace(
        meter.read(),
        peak_allocated=max(torch.cuda.max_memory_allocated(card) for card in range(devices)),
        peak_reserved=max(torch.cuda.max_memory_reserved(card) for card in range(devices)),
    )


def time_distributed(recipe: Recipe, device: Device, source: WindowSource, warm_up: int, steps: int) -> Timings:
    """Steps of this process, one of several that torchrun started, over NCCL on a GPU each, else over gloo; the memory
    is that of the fullest.

    source: this process's own part of every window.
    """
    rank = int(os.environ["RANK"])
    if device.kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device.kind == "cuda" else "gloo")
    meter = Meter(torch.device(device.kind), warm_up=warm_up, steps=steps, seed=recipe.seed + rank)
    with memory_guard(lambda: f"process {rank} of {dist.get_world_size()}"):
        found = _time_share(recipe, device, source, meter)
    gc.collect()  # the last to hold the group must not be DistributedDataParallel, which would end it without yielding
    dist.destroy_process_group()
    return found


def _time_share(recipe: Recipe, device: Device, source: WindowSource, meter: Meter) -> Timings:
    build = PytorchBackend().build(recipe, device)
    own = [torch.cuda.current_device()] if device.kind == "cuda" else None
    wrapped = DistributedDataParallel(LossModule(build), device_ids=own)

    def divisor(window: TensorWindow) -> float:
        # gradients are averaged over the processes, and belong to the sum over them
        return max(_sums([window.count], build)[0], 1) / dist.get_world_size()

    def exchange(last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else wrapped.no_sync()

    _take_steps(replace(build, shared_loss=_loss_of(wrapped), divisor=divisor, exchange=exchange), source, meter)
    return _fullest(meter.read(), build)


def _loss_of(wrapped: nn.Module) -> LossSum:
    return lambda batch: wrapped(**vars(batch)).sum()


def _take_steps(build: Build, source: WindowSource, meter: Meter) -> None:
    step = Step(build, inspect=False)  # looking into the model would pass by what wraps it
    windows: Iterator[TensorWindow] = step.windows(source, 0, meter.total)
    with build.session():
        meter.start()
        for window in windows:
            loss = step(window, build.recipe.learning_rate).read().loss
            meter.end(_over_processes(loss, build).mean)


def _over_processes(total: Total, build: Build) -> Total:
    if not dist.is_initialized():
        return total
    loss, count = _sums([total.sum, total.count], build)
    return Total(loss, int(count))


def _sums(numbers: list[float], build: Build) -> list[float]:
    """The sum of each number over all processes."""
    summed = torch.tensor(numbers, dtype=torch.float64, device=build.torch_device)
    dist.all_reduce(summed)
    found: list[float] = summed.tolist()
    return found


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

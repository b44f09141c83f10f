"""Our step on two devices: what DataParallel and DistributedDataParallel make of the same build, data and seed.

Whatever the split, the loss of a step is the sum over all of the global batch's labels, divided by their number.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tightfit.backends.base import Timings
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import TensorBatch, TensorWindow
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.losses import cross_entropy_sum
from tightfit.backends.pytorch.measuring.meter import Meter
from tightfit.backends.pytorch.memory import memory_guard
from tightfit.data import prepare
from tightfit.data.loading import WindowLoader, make_window
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.ladder.rungs import DEVICES
from tightfit.models import model_facts
from tightfit.recipe import Recipe
from tightfit.tasks import Window


def data_parallel(recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
    """Two GPUs in one process: each micro-batch of twice the recipe's is cut in two, and the model copied, anew."""
    found = torch.cuda.device_count() if device.kind == "cuda" else 0
    if found < DEVICES:
        raise Refused(f"launch: DataParallel splits a batch over two GPUs, and this machine has {found}; run it where "
                      "there are two")
    assert recipe.compile != "auto"
    if recipe.compile.name != "off":
        raise Refused("compile: DataParallel copies the model anew at every step; write compile=off")
    micro = recipe.micro_batch_size
    assert micro != "auto"
    both = recipe.override(micro_batch_size=min(DEVICES * micro, recipe.batch_size))
    data = WindowLoader(prepare(both, model_facts(both)).train, both)
    if data.window(0).micro_batches[0].mask == "packed":
        raise Refused("data.packing: DataParallel cannot cut rows that documents share; write data.packing=false")
    meter = Meter(torch.device("cuda"), warm_up=warm_up, steps=steps, seed=recipe.seed)
    with memory_guard(lambda: "DataParallel"):
        build = PytorchBackend().build(both, device)
        assert build.windows is not None
        wrapped = DataParallel(LossSum(build), device_ids=list(range(DEVICES)))
        _train(build, wrapped, build.windows(data, 0, meter.total), meter)
    read = meter.read()
    return replace(
        read,
        peak_allocated=max(torch.cuda.max_memory_allocated(card) for card in range(DEVICES)),
        peak_reserved=max(torch.cuda.max_memory_reserved(card) for card in range(DEVICES)),
    )


def distributed(recipe: Recipe, device: Device, warm_up: int, steps: int, *, direct: bool) -> Timings:
    """This process's half of every global batch, and what the fuller process needed. Two processes call it: on a GPU
    each where there are two, over NCCL; on the processor otherwise, over gloo.

    direct: whether the GPUs may use their direct link, which has to be settled before the processes start.
    """
    rank, cards = int(os.environ["RANK"]), torch.cuda.device_count() if device.kind == "cuda" else 0
    if cards < DEVICES and not direct:
        raise Refused(f"launch: NCCL switches off the direct link between two GPUs, and this machine has {cards}; run "
                      "it where there are two")
    data = WindowLoader(prepare(recipe, model_facts(recipe)).train, recipe)
    if any(len(data.chosen(step)[0]) < DEVICES for step in range(warm_up + steps + 1)):
        raise Refused(f"batch_size: a step of one sample cannot be shared by {DEVICES} processes; write an even "
                      "batch_size that divides the samples")
    if cards < DEVICES:
        device = PytorchBackend().device(recipe.override(device="cpu"))
    if reasons := recipe.refusals(device):
        raise Refused("; ".join(reasons))
    if device.kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device.kind == "cuda" else "gloo")
    meter = Meter(torch.device(device.kind), warm_up=warm_up, steps=steps, seed=recipe.seed + rank)
    with memory_guard(lambda: f"process {rank} of {DEVICES}"):
        found = _train_share(recipe, device, _Share(data, rank), meter)
    gc.collect()  # the last to hold the group must not be DistributedDataParallel, which would end it without yielding
    dist.destroy_process_group()
    return found


def _train_share(recipe: Recipe, device: Device, share: _Share, meter: Meter) -> Timings:
    build = PytorchBackend().build(recipe, device)
    assert build.windows is not None
    cards = [torch.cuda.current_device()] if device.kind == "cuda" else None
    wrapped = DistributedDataParallel(LossSum(build), device_ids=cards)
    _train(build, wrapped, build.windows(share, 0, meter.total), meter)
    return _fullest(meter.read(), build)


class _Share:
    """One process's samples of every window, in micro-batches of the recipe's size."""

    def __init__(self, data: WindowLoader, rank: int) -> None:
        self._data, self._rank = data, rank

    def __len__(self) -> int:
        return len(self._data)

    def window(self, index: int) -> Window:
        chosen, epoch = self._data.chosen(index)
        share = np.array_split(chosen, DEVICES)[self._rank]
        return make_window(self._data.samples, share, self._data.micro_batch_size, epoch, f"window {index}")


class LossSum(nn.Module):
    """A micro-batch's summed loss, (1,), made where the micro-batch is: logits would have to travel."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.model = build.model
        self._build = build

    def forward(self, **fields: Any) -> Tensor:
        """fields: of a TensorBatch."""
        batch = TensorBatch(**fields)
        build = replace(self._build, model=self.model)  # DataParallel calls copies of this module
        with build.forward_context():
            return cross_entropy_sum(build.logits(batch), batch.labels)[None]


def _train(build: Build, wrapped: nn.Module, windows: Iterator[TensorWindow], meter: Meter) -> None:
    """Take the meter's steps."""
    assert build.optimizer_factory is not None
    optimizer = build.optimizer_factory(build.model)
    scaler = torch.amp.GradScaler(build.torch_device.type, enabled=build.loss_scaling)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    with build.session():
        meter.start()
        for window in windows:
            count = _over_processes(torch.tensor(window.count, device=build.torch_device)).item()
            total = torch.zeros((), device=build.torch_device)
            for number, batch in enumerate(window.micro_batches, 1):
                with _alone(wrapped, number < len(window.micro_batches)):
                    loss = wrapped(**vars(batch.to(build.torch_device))).sum()
                    total += loss.detach()
                    # gradients are averaged over processes, and belong to the sum over them
                    scaler.scale(loss * (processes / count)).backward()
            scaler.unscale_(optimizer)
            if build.recipe.max_grad_norm:
                nn.utils.clip_grad_norm_(build.model.parameters(), build.recipe.max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            meter.end(_over_processes(total).item() / count)


def _alone(wrapped: nn.Module, more: bool) -> AbstractContextManager[Any]:
    """Where more micro-batches follow, gradients stay in their process."""
    return wrapped.no_sync() if more and isinstance(wrapped, DistributedDataParallel) else nullcontext()


def _over_processes(number: Tensor) -> Tensor:
    """The sum of a number of every process's."""
    if dist.is_initialized():
        dist.all_reduce(number)
    return number


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

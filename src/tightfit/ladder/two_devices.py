"""Rungs on two devices: the share of each, and what has to be there."""

from __future__ import annotations

import os

import numpy as np

from tightfit.backends.base import Timings
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.measure.parallel_timing import cards, time_distributed, time_in_one_process
from tightfit.data.loading import GlobalBatchLoader, make_global_batch
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.ladder.jobs import DEVICES
from tightfit.ladder.rungs import Launch
from tightfit.recipe import Recipe
from tightfit.tasks import GlobalBatch
from tightfit.training.session import training_global_batches


def run_parallel(launch: Launch, recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
    """A rung on two devices. Raises Refused where what it needs is missing, and OutOfMemory.

    launch: `dp` for two GPUs in one process, each micro-batch of twice the recipe's cut in two; else this process's
    half of every global batch, and what the fuller process needed, on a GPU each where there are two, on the processor
    otherwise.
    """
    found = cards(device)
    if launch == "dp":
        if found < DEVICES:
            raise Refused(f"launch: DataParallel splits a batch over two GPUs, and this machine has {found}; run it "
                          "where there are two")
        if recipe.compiled:
            raise Refused("compile: DataParallel copies the model anew at every step; write compile=off")
        micro = recipe.micro_batch_size
        assert micro != "auto"
        both = recipe.override(parallel="dp", micro_batch_size=min(DEVICES * micro, recipe.batch_size))
        data = training_global_batches(both)
        if data.global_batch(0).micro_batches[0].mask == "packed":
            raise Refused("data.packing: DataParallel cannot cut rows that documents share; write data.packing=false")
        return time_in_one_process(both, device, data, warm_up, steps)
    if found < DEVICES and launch != "ddp":
        raise Refused(f"launch: NCCL switches off the direct link between two GPUs, and this machine has {found}; run "
                      "it where there are two")
    data = training_global_batches(recipe)
    if any(len(data.chosen(step)[0]) < DEVICES for step in range(warm_up + steps + 1)):
        raise Refused(f"batch_size: a step of one sample cannot be shared by {DEVICES} processes; write an even "
                      "batch_size that divides the samples")
    if found < DEVICES:
        device = PytorchBackend().device(recipe.override(device="cpu"))
    if reasons := recipe.refusals(device):
        raise Refused("; ".join(reasons))
    share = _Share(data, int(os.environ["RANK"]))
    return time_distributed(recipe.override(parallel="ddp"), device, share, warm_up, steps)


class _Share:
    """One process's samples of every global batch, in micro-batches of the recipe's size."""

    def __init__(self, data: GlobalBatchLoader, rank: int) -> None:
        self._data, self._rank = data, rank

    def __len__(self) -> int:
        return len(self._data)

    def global_batch(self, index: int) -> GlobalBatch:
        chosen, epoch = self._data.chosen(index)
        share = np.array_split(chosen, DEVICES)[self._rank]
        return make_global_batch(self._data.samples, share, self._data.micro_batch_size, epoch, f"global batch {index}")

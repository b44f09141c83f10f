"""Data parallelism by torch's own means: DataParallel and DistributedDataParallel around the loss of the same build.

However a global batch is split, the loss of a step is the sum over all of its labels, divided by their number.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tightfit.backends.pytorch.batch import TensorBatch, TensorGlobalBatch
from tightfit.backends.pytorch.build import Build, LossSum
from tightfit.techniques.parallel import Ddp, Dp


def dp(technique: Dp, build: Build) -> Build:
    """Each micro-batch is cut into as many parts as this process has GPUs, and the model copied to them, anew."""
    return replace(build, replicated_loss=_loss_of(DataParallel(LossModule(build))))


def ddp(technique: Ddp, build: Build) -> Build:
    """This process has a part of each global batch. Its process group has been joined, and its GPU is the current
    one."""
    own = [torch.cuda.current_device()] if build.torch_device.type == "cuda" else None
    wrapped = DistributedDataParallel(LossModule(build), device_ids=own)

    def denominator(global_batch: TensorGlobalBatch) -> float:
        # gradients are averaged over the processes, and belong to the sum over them
        return max(process_sums([global_batch.count], build.torch_device)[0], 1) / dist.get_world_size()

    def sync(last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else wrapped.no_sync()

    return replace(build, replicated_loss=_loss_of(wrapped), loss_denominator=denominator, gradient_sync=sync)


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


def process_sums(numbers: list[float], device: torch.device) -> list[float]:
    """The sum of each number over all processes."""
    summed = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    found: list[float] = summed.tolist()
    return found


def _loss_of(wrapped: nn.Module) -> LossSum:
    return lambda batch: wrapped(**vars(batch)).sum()

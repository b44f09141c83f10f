"""Parallel training by torch's own means: DataParallel, DistributedDataParallel and FSDP around the loss of one build.

However a global batch is split, the loss of a step is the sum over all of its labels, divided by their number.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build, Check, TrainingLoss
from tightfit.backends.pytorch.world import TorchWorld, not_started
from tightfit.techniques.parallel import Ddp, Dp


def dp(technique: Dp, build: Build) -> Build:
    """Each micro-batch is cut into as many parts as this process has GPUs, and the model copied to them, anew."""
    return replace(build, training_loss=_loss_of(DataParallel(LossModule(build))))


def ddp(technique: Ddp, build: Build) -> Build:
    """This process has a part of each global batch. Gradients are views of the buckets that are summed."""
    build = _in_world(build)
    own = [torch.cuda.current_device()] if build.torch_device.type == "cuda" else None
    with warnings.catch_warnings():  # later versions of torch have another name for it
        warnings.filterwarnings("ignore", message=".*broadcast_buffers")
        # Buffers are constants, or statistics of which the first process's are kept.
        wrapped = DistributedDataParallel(LossModule(build), device_ids=own, gradient_as_bucket_view=True,
                                          broadcast_buffers=False)

    def sync(last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else wrapped.no_sync()

    return replace(build, training_loss=_loss_of(wrapped), gradient_sync=sync)


def _in_world(build: Build) -> Build:
    """The build in the world that was joined, with random numbers of this process's own from here on."""
    if not dist.is_initialized():
        raise not_started(build.recipe.parallel.name)
    world = TorchWorld()
    torch.manual_seed(build.recipe.seed + world.rank)
    return replace(build, world=world)


class LossModule(nn.Module):
    """A micro-batch's summed loss, (1,), made where the micro-batch is: logits would have to travel."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.model = build.model
        self._build = build

    def forward(self, check: Check | None = None, **fields: Any) -> Tensor:
        """fields: of a TensorBatch. check: as of `Build.loss_sum`."""
        build = replace(self._build, model=self.model)  # DataParallel calls copies of this module
        return build.loss_sum(TensorBatch(**fields), check)[None]


def _loss_of(wrapped: nn.Module) -> TrainingLoss:
    return lambda batch, check: wrapped(check, **vars(batch)).sum()

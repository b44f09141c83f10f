"""Parallel training: torch's DataParallel, DistributedDataParallel and FSDP around the loss of one build, and ZeRO.

However a global batch is split, the loss of a step is the sum over all of its labels, divided by their number.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build, Check, TrainingLoss
from tightfit.backends.pytorch.world import TorchWorld, not_started
from tightfit.errors import ModelError
from tightfit.techniques.parallel import Ddp, Fsdp, Zero

UNFINISHED_REDUCTION = "Expected to have finished reduction in the prior iteration"
"""Part of what DistributedDataParallel says in the step after one in which gradients were missing."""


def dp(build: Build) -> Build:
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

    whole_loss = _loss_of(wrapped)

    def loss(batch: TensorBatch, check: Check | None) -> Tensor:
        try:
            return whole_loss(batch, check)
        except RuntimeError as error:
            if UNFINISHED_REDUCTION not in str(error):
                raise
            raise ModelError(f"parallel: ddp waits for the gradient of every parameter, and some of "
                             f"{type(build.model).__name__} have no part in the loss; write parallel=fsdp, or set "
                             "their requires_grad to False") from None

    return replace(build, training_loss=loss, gradient_sync=sync)


def fsdp(technique: Fsdp, build: Build) -> Build:
    """This process has a part of each global batch, and of each parameter by its first dimension. A block is gathered
    at a time; what lies outside of the blocks is gathered from the forward pass to the backward pass."""
    return _fully_sharded(technique, build, _gathered_in(build))


def _fully_sharded(technique: Fsdp, build: Build, gathered_in: torch.dtype | None) -> Build:
    """gathered_in: the format in which blocks are gathered; None for that of their weights."""
    build = _in_world(build)
    cuda = build.torch_device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": build.world.mesh(build.torch_device.type),
        "offload_policy": CPUOffloadPolicy(pin_memory=cuda) if technique.cpu_offload else OffloadPolicy(),
    }
    for block in build.blocks:
        fully_shard(block, mp_policy=_formats(gathered_in), reshard_after_forward=technique.reshard, **options)
    # The loss and its gradient may use the head's weights after the forward pass.
    model = fully_shard(build.model, mp_policy=_formats(None), reshard_after_forward=False, **options)

    @contextmanager
    def sync(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last or technique.gradient_sync == "every")
        yield

    def reshard() -> None:
        for module in build.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    return replace(build, gradient_sync=sync, drop_gathered=reshard, settings=(*build.settings, _views_are_only_read))


def zero(technique: Zero, build: Build) -> Build:
    """This process has a part of each global batch, and DeepSpeed's engine the rest in its hands."""
    if build.world.simulated:  # FSDP divides and gathers what stage 3 does, in the weights' format
        return _fully_sharded(Fsdp(cpu_offload=technique.cpu_offloads), build, None)
    build = _in_world(build)
    # Only whoever asks for it pays for the library.
    from tightfit.backends.pytorch.techniques.zero.engine import wrap

    return wrap(technique, build, LossModule(build))


def _gathered_in(build: Build) -> torch.dtype | None:
    """The format in which blocks are gathered: that of their products under autocast, which would else keep a copy in
    it of every weight that it has seen. A GPU's norms take weights in it; a processor's do not: None, as they are."""
    precision = build.recipe.precision
    if build.device.kind == "cpu" or precision == "auto" or not precision.autocast:
        return None
    dtype: torch.dtype = getattr(torch, precision.computes_in)
    return dtype


def _formats(gathered_in: torch.dtype | None) -> MixedPrecisionPolicy:
    """Gradients are summed in fp32; what goes into a block is left to autocast."""
    return MixedPrecisionPolicy(param_dtype=gathered_in, reduce_dtype=torch.float32, cast_forward_inputs=False)


@contextmanager
def _views_are_only_read() -> Iterator[None]:
    """Keep torch from warning of a model's logits that are a view, which a loss could change in place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        yield


def _in_world(build: Build) -> Build:
    """The build in the world that was joined, with random numbers of this process's own from here on."""
    if build.world.simulated:
        return build
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

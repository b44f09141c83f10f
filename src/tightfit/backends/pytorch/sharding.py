"""Tensors of which several processes hold a part each: torch's DTensor, and DeepSpeed's parameters of stage 3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True)
class UngatheredTensor:
    """A tensor that does not exist whole. gather: makes it, for all processes at once."""

    shape: torch.Size
    dtype: torch.dtype
    gather: Callable[[], Tensor]

    def numel(self) -> int:
        return self.shape.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize

    def detach(self) -> UngatheredTensor:
        return self


def is_sharded(tensor: Tensor) -> bool:
    """Whether other processes hold parts of the tensor."""
    return isinstance(tensor, DTensor) or _by_deepspeed(tensor)


def full_tensor(tensor: Tensor | UngatheredTensor) -> Tensor:
    """The tensor with the parts that other processes hold of it; all of them call this."""
    if isinstance(tensor, UngatheredTensor):
        return tensor.gather()
    if _by_deepspeed(tensor):
        import deepspeed  # where it has divided the tensor

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, values: Tensor) -> Tensor:
    """The part that this process holds of `tensor`, from values that every process has whole."""
    if not isinstance(tensor, DTensor):
        return values
    # Each cuts its own part out: no other process sends it.
    return distribute_tensor(values.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    if _by_deepspeed(tensor):
        part: Tensor = tensor.ds_tensor  # type: ignore[attr-defined]
        return part
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_on_drive(tensor: Tensor) -> bool:
    """Whether this process's part of a tensor waits on a drive."""
    return _by_deepspeed(tensor) and tensor.ds_tensor.status.name == "NOT_AVAILABLE"  # type: ignore[attr-defined]


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape of a parameter with all its parts."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _by_deepspeed(tensor: Tensor) -> bool:
    return hasattr(tensor, "ds_tensor")

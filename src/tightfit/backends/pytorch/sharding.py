"""Tensors of which several processes hold a part each, as torch's DTensor."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether other processes hold parts of the tensor."""
    return isinstance(tensor, DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor with the parts that other processes hold of it; all of them call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, values: Tensor) -> Tensor:
    """Of values that every process has whole, the part that this one holds of `tensor`."""
    if not isinstance(tensor, DTensor):
        return values
    # Each cuts its own part out: no other process sends it.
    return distribute_tensor(values.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""Memory of the card in use now: PyTorch's, the CUDA context's, other processes'."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from tightfit.errors import Refused


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Bytes of one card at one moment. None where the driver does not say what each process has, as without
    nvidia-ml-py or in a container that hides process ids.

    in_use: everything that CUDA does not count as free: all processes', and what the driver keeps.
    allocated, reserved: of PyTorch's allocator in this process: by tensors, and taken from the card for them.
    context: the rest of what this process has: the CUDA context, loaded kernels, the memory of libraries.
    others: what other processes have.
    """

    device: str
    total: int
    in_use: int
    allocated: int
    reserved: int
    context: int | None
    others: int | None


def held_memory(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Bytes of the current card by what holds them, the most first; empty without one. What is neither weights nor
    gradients nor optimizer states is mostly activations."""
    if not torch.cuda.is_available():
        return {}

    def count(tensors: Iterable[object]) -> int:
        return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.is_cuda)

    parameters = list(model.parameters())
    held = {
        "weights": count(parameters), "gradients": count(p.grad for p in parameters),
        "optimizer states": count(value for state in optimizer.state.values() for value in state.values()),
    }  # fmt: skip
    held["activations and others"] = max(torch.cuda.memory_allocated() - sum(held.values()), 0)
    return dict(sorted(held.items(), key=lambda item: -item[1]))


def gpu_memory(device: int | str | torch.device | None = None) -> GpuMemory:
    """Memory in use on a CUDA device; by default on the current one.

    Raises Refused where there is no such device.
    """
    if not torch.cuda.is_available():
        raise Refused("gpu_memory: there is no CUDA device here that PyTorch can use; `tightfit doctor` says why")
    try:
        chosen = torch.device("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)
        index = torch.cuda.current_device() if chosen.index is None else chosen.index
        known = chosen.type == "cuda" and index < torch.cuda.device_count()
    except RuntimeError:  # no device by its name
        known = False
    if not known:
        raise Refused(f"gpu_memory: {device!r} is not one of the {torch.cuda.device_count()} CUDA devices here; "
                      "write cuda:0 for the first")
    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    reserved = torch.cuda.memory_reserved(index)
    from tightfit.nvml import process_bytes  # where a GPU is

    own, others = process_bytes(f"GPU-{about.uuid}")
    return GpuMemory(
        device=about.name, total=total, in_use=total - free,
        allocated=torch.cuda.memory_allocated(index), reserved=reserved,
        context=None if own is None or own < reserved else own - reserved, others=others,
    )  # fmt: skip

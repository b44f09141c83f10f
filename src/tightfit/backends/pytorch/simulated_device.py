"""Devices that fake tensors stand for: planning runs the training step on fake tensors in place of a device's own.

The training code that chooses by device asks here, and so knows nothing of planning: a fake tensor carries the device
that it stands for as its mode's `target` (see `simulate.target.PlanningMode`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, active_fake_mode
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from tightfit.devices import Device


def simulated_device(tensor: Any) -> Device | None:
    """The device that a tensor of a PlanningMode stands for; None for every other tensor."""
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    target: Device | None = getattr(tensor.fake_mode, "target", None) if isinstance(tensor, FakeTensor) else None
    return target


def simulated_cuda_device(tensor: Any) -> Device | None:
    """`simulated_device`, where it is a CUDA device; else None."""
    target = simulated_device(tensor)
    return target if target is not None and target.kind == "cuda" else None


def active_simulated_cuda() -> Device | None:
    """The CUDA device that the tensors made now stand for; None where they stand for themselves."""
    target: Device | None = getattr(active_fake_mode(), "target", None)
    return target if target is not None and target.kind == "cuda" else None


def stands_for_cuda(tensor: Any) -> bool:
    """Whether a tensor stands for one on a CUDA device, for a compiler that follows it as well."""
    if torch.compiler.is_compiling():
        compiled: bool = _compiled_for_cuda()
        return compiled
    return simulated_cuda_device(tensor) is not None


def capability_of(tensor: Tensor) -> tuple[int, int] | None:
    """The compute capability of the CUDA device that a tensor is on, or stands for being on; None on the CPU."""
    if torch.compiler.is_compiling():
        capability: tuple[int, int] | None = _compiled_capability(tensor.device.type)
        return capability
    target = simulated_device(tensor)
    if target is not None:
        return target.capability
    return torch.cuda.get_device_capability() if tensor.device.type == "cuda" else None


def _compiled_target() -> Device | None:
    """The device that every tensor of the graph being compiled stands for: a compiler follows no type of fake tensor.
    """
    context = TracingContext.try_get()
    target: Device | None = None if context is None else getattr(context.fake_mode, "target", None)
    return target


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiled_for_cuda() -> bool:
    target = _compiled_target()
    return target is not None and target.kind == "cuda"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiled_capability(kind: str) -> tuple[int, int] | None:
    """Compute capability of every tensor of the graph being compiled."""
    target = _compiled_target()
    if target is not None:
        return target.capability
    return torch.cuda.get_device_capability() if kind == "cuda" else None

"""The kernel that scaled_dot_product_attention takes on a CUDA device, as a function of the device and the call.

The rules are those of PyTorch 2.11 to 2.13, for dense tensors (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
and sdp_utils_cpp.h, which ships with torch); a rule that differs between these says since when. They are those of the
Linux wheels, built for CUDA 13: those of torch 2.11 bring cuDNN 9.19, those of 2.12 cuDNN 9.20. An order set by hand
(`sdpa_kernel(..., set_priority=True)`, or the environment variable TORCH_CUDNN_SDPA_DEPRIORITIZED) is not read. Not
yet measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tightfit.backends.pytorch.techniques.attention.kernels import HALF
from tightfit.devices import Device
from tightfit.errors import ModelError

Kernel = Literal["flash", "efficient", "cudnn", "math"]
Version = tuple[int, int]

KERNEL_ORDER: tuple[Kernel, ...] = ("flash", "efficient", "math", "cudnn")
CUDNN_FIRST: tuple[Kernel, ...] = ("cudnn", "flash", "efficient", "math")
CUDNN_FIRST_MAJORS = (9, 10)
"""Compute capabilities (the major part) on which cuDNN from 9.15.1 on comes first: Hopper, and Blackwell servers."""
NEWEST_CAPABILITY = (12, 1)
"""The newest capability that the fused kernels are offered for."""


@dataclass(frozen=True)
class Call:
    """A call of scaled_dot_product_attention.

    query: (B, H, T, D). key, value: (B, heads for keys, K, D), the value's D its own. grouped: whether heads may be
    shared (`enable_gqa`).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def learns(self) -> bool:
        """Whether a gradient is asked of query, key or value, in the grad mode of the moment."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.inputs)

    @property
    def in_rows(self) -> bool:
        """Whether the last dimension of query, key and value has stride 1."""
        return all(t.stride(-1) == 1 for t in self.inputs)

    @property
    def mask_in_rows(self) -> bool:
        return self.mask is None or self.mask.stride(-1) == 1


def torch_release() -> Version:
    """The running torch's major and minor version: a prediction is for the CUDA build of the same."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def allowed_kernels() -> frozenset[Kernel]:
    """The kernels that `torch.nn.attention.sdpa_kernel` lets run now."""
    flags = torch.backends.cuda
    enabled: dict[Kernel, bool] = {
        "flash": flags.flash_sdp_enabled(), "efficient": flags.mem_efficient_sdp_enabled(),
        "cudnn": flags.cudnn_sdp_enabled(), "math": flags.math_sdp_enabled(),
    }  # fmt: skip
    return frozenset(kernel for kernel, on in enabled.items() if on)


def choose(call: Call, device: Device, allowed: Iterable[Kernel], version: Version | None = None) -> Kernel:
    """The kernel that PyTorch takes for `call` on `device`: the first in the device's order that is allowed and can
    serve. Raises ModelError where none can."""
    version = version or torch_release()
    allowed = frozenset(allowed)
    for kernel in priority(device):
        if kernel in allowed and not obstacles(kernel, call, device, version):
            return kernel
    reasons = "; ".join(
        f"{kernel}: {obstacle}" for kernel in sorted(allowed) for obstacle in obstacles(kernel, call, device, version)
    )
    raise ModelError(f"attention: no allowed kernel of scaled_dot_product_attention can run on the {device.name} "
                     f"({reasons or 'none is allowed'}); write attention.kernel=auto")


def priority(device: Device) -> tuple[Kernel, ...]:
    """The order in which kernels are tried."""
    return CUDNN_FIRST if _capability(device)[0] in CUDNN_FIRST_MAJORS else KERNEL_ORDER


def obstacles(kernel: Kernel, call: Call, device: Device, version: Version) -> list[str]:
    """The reason why `kernel` cannot serve `call` on `device`; empty where it can."""
    if kernel == "math":
        return []
    shared = _shared_obstacles(call)
    if "not four dimensions" in shared:
        return shared
    return shared + CHECKS[kernel](call, _capability(device), version)


def _flash_obstacles(call: Call, capability: tuple[int, int], version: Version) -> list[str]:
    size = call.query.shape[-1]
    # The backward pass of these heads does not fit the smaller shared memory of these GPUs.
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= NEWEST_CAPABILITY
    return _holding({
        "a mask": call.mask is not None,
        "heads of query, key and value differ in size": len({t.shape[-1] for t in call.inputs}) > 1,
        "a head larger than 256": size > 256,
        "a GPU before compute capability 8.0": not (8, 0) <= capability <= NEWEST_CAPABILITY,
        "training heads of 193 to 224, or larger with dropout, on a GPU with little shared memory":
            call.learns and small and (192 < size <= 224 or (size > 224 and call.dropout > 0)),
        "causal over keys of another length": call.causal and call.query.shape[2] != call.key.shape[2],
        "not half precision throughout": not _all_in(call, HALF),
        "head counts that differ": _heads_differ(call, grouped=True),
        "a last dimension that is not contiguous": not (call.in_rows or size == 1) or not call.mask_in_rows,
    })  # fmt: skip


def _efficient_obstacles(call: Call, capability: tuple[int, int], version: Version) -> list[str]:
    formats = (torch.float16, torch.float32, torch.bfloat16) if capability >= (8, 0) else (torch.float16, torch.float32)
    unit = _gemm_alignment(call.query.dtype, capability)
    sizes = (call.query.shape[-1], call.value.shape[-1])
    return _holding({
        "a GPU before compute capability 5.0": not (5, 0) <= capability <= NEWEST_CAPABILITY,
        "heads of query and key differ in size": call.query.shape[-1] != call.key.shape[-1],
        f"a head that is no multiple of {unit}": any(size % unit or not size for size in sizes),
        "a format this GPU's kernel has not": not _all_in(call, formats),
        "head counts that differ": _heads_differ(call, grouped=False),
        "a last dimension that is not contiguous": not (call.in_rows and call.mask_in_rows),
    })  # fmt: skip


def _cudnn_obstacles(call: Call, capability: tuple[int, int], version: Version) -> list[str]:
    query, value = call.query.shape[-1], call.value.shape[-1]
    limit = 128
    if capability == (9, 0):
        limit = 256
    elif capability[0] == 10 and (query, value) == (192, 128):
        limit = 192
    return _holding({
        "a GPU before compute capability 8.0": not (8, 0) <= capability <= NEWEST_CAPABILITY,
        "not half precision throughout": not _all_in(call, HALF),
        "a mask that learns": call.mask is not None and call.mask.requires_grad,
        "a mask that does not fit": call.mask is not None and not _mask_fits(call),
        # Since torch 2.12 (pytorch pull request 174245): the kernel knows dropout in steps of 1/16 only.
        "a dropout that is no multiple of 1/16": version >= (2, 12) and (call.dropout * 16) % 1 != 0,
        f"a head larger than {limit}": max(query, value) > limit,
        "a head that is no multiple of 8": bool(query % 8 or value % 8),
        "one key, or one query with dropout": call.key.shape[2] == 1 or (call.query.shape[2] == 1 and call.dropout > 0),
        "head counts that differ": _heads_differ(call, grouped=True, same_keys=False),
        "a last dimension that is not contiguous": not (call.in_rows or query == 1) or not call.mask_in_rows,
        "deterministic algorithms":
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled(),
    })  # fmt: skip


CHECKS: dict[Kernel, Callable[[Call, tuple[int, int], Version], list[str]]] = {
    "flash": _flash_obstacles, "efficient": _efficient_obstacles, "cudnn": _cudnn_obstacles,
}  # fmt: skip


def _shared_obstacles(call: Call) -> list[str]:
    """Reasons against every fused kernel."""
    if {t.dim() for t in call.inputs} != {4}:
        return ["not four dimensions"]
    return _holding({
        "batches that differ": len({t.shape[0] for t in call.inputs}) > 1,
        "no queries or no keys": 0 in (call.query.shape[2], call.key.shape[2]),
    })  # fmt: skip


def _holding(reasons: dict[str, bool]) -> list[str]:
    return [reason for reason, holds in reasons.items() if holds]


def _all_in(call: Call, formats: tuple[torch.dtype, ...]) -> bool:
    return len({t.dtype for t in call.inputs}) == 1 and call.query.dtype in formats


def _heads_differ(call: Call, *, grouped: bool, same_keys: bool = True) -> bool:
    """Whether the heads do not match. grouped: whether the kernel lets queries share keys where the call allows it."""
    heads, keys, values = (t.shape[1] for t in call.inputs)
    if call.grouped and grouped:
        return (same_keys and keys != values) or bool(heads % keys or heads % values)
    return len({heads, keys, values}) > 1


def _mask_fits(call: Call) -> bool:
    assert call.mask is not None
    whole = (*call.query.shape[:3], call.key.shape[2])
    sizes = zip(reversed(call.mask.shape), reversed(whole), strict=False)
    return call.mask.dim() in (2, 4) and all(size in (1, full) for size, full in sizes)


def _gemm_alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Elements that the efficient kernel's matrix products want a head's size to be a multiple of."""
    half = dtype in HALF
    cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    least = 4 if capability >= (8, 0) else 1
    return max(least, 128 // (16 if half else 32)) if cores else least


def _capability(device: Device) -> tuple[int, int]:
    assert device.capability is not None, "a CUDA device has a compute capability"
    return device.capability

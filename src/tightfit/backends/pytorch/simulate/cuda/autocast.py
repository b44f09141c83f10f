"""CUDA's autocast for fake CPU tensors: the ops that it casts, and to what.

Which ops those are is read from the running torch: their policies from the header that ships with it
(include/ATen/autocast_mode.h), their names from the dispatcher, where the CUDA kernels are registered in CPU builds
too. Kernels of ours take the place of the CPU's where the two lists differ, as the header says each policy works. Where
both cast to the lower precision, the CPU's own kernel stays, and with it torch's cache of cast weights, which lives
until the outermost autocast region ends. Ops on the CPU's list alone run as if there were no autocast. A weight cast by
one of our kernels (`einsum`, `mv` and such) is not cached: that shows only where one weight is used more than once.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightfit.backends.pytorch.follow.dispatch_mode import never_compiled
from tightfit.backends.pytorch.simulated_device import simulated_cuda_device
from tightfit.errors import ModelError

AUTOCAST = torch._C.DispatchKey.AutocastCPU
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


class Policy(StrEnum):
    """Treatment of an op's floating-point arguments, fp64 aside. The names are the header's."""

    LOWER = "LOWER_PRECISION_FP"
    """Cast to autocast's own format."""
    FP32 = "FP32"
    """Cast to fp32."""
    SET_DTYPE = "FP32_SET_OPT_DTYPE"
    """Ask for a result in fp32, where no format is asked for."""
    PROMOTE = "PROMOTE"
    """Cast to the widest format among them."""
    BANNED = "BANNED"
    """Refuse: the op is not safe in half precision."""


LISTED_APART = {
    "aten::binary_cross_entropy": Policy.BANNED,
    "aten::cudnn_convolution": Policy.LOWER,
    "aten::cudnn_convolution_transpose": Policy.LOWER,
}
"""CUDA's ops that are not in the header (aten/src/ATen/autocast_mode.cpp)."""

RETURNS_FP32 = "DIFFERENT_REDISPATCH_SIGNATURE"
"""The header's name of norms that are asked for a result in fp32. Here their arguments are cast: `torch.norm` runs
other ops."""


def cuda_policies(header: Path = HEADER) -> dict[str, Policy]:
    """The ops that CUDA's autocast handles in the running torch, by the dispatcher's name."""
    listed = dict(LISTED_APART)
    for name, body in re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)*.*)", header.read_text("utf-8")):
        if name == RETURNS_FP32:
            listed |= {f"aten::{op}": Policy.FP32 for op in re.findall(r'"([\w.]+)"', body)}
        elif name in set(Policy):
            ops = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body)
            listed |= {f"aten::{op}.{overload}".removesuffix("."): Policy(name) for op, overload in ops}
    handled = _registered("AutocastCUDA")
    return {op: policy for op, policy in listed.items() if op in handled}


@contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """`torch.autocast("cpu")` casts as `torch.autocast("cuda")` would, for tensors that stand for a CUDA device's; for
    others nothing changes. Undone on leaving. Where torch came without its headers, the CPU's list stays, with a
    warning."""
    if not HEADER.exists():
        warnings.warn(f"torch came without its headers ({HEADER}): autocast is planned by the CPU's list of ops, which "
                      "runs fewer of them in fp32 than CUDA's", stacklevel=3)
        yield
        return
    policies, on_cpu = cuda_policies(), _registered("AutocastCPU")
    library = torch.library.Library("aten", "IMPL")
    never_compiled(_autocast)
    try:
        for name in sorted(on_cpu | policies.keys()):
            if name in on_cpu and policies.get(name) is Policy.LOWER:
                continue  # the CPU's list casts these as well
            op = _overload(name)
            before = torch.library.get_kernel(op, AUTOCAST) if name in on_cpu else None
            kernel = partial(_autocast, op, policies.get(name), before)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
                library.impl(name, kernel, "AutocastCPU", with_keyset=True, allow_override=True)
        yield
    finally:
        library._destroy()


def _registered(key: str) -> set[str]:
    """Names of torch's own ops; a library such as torchvision registers its ops for both devices in the same way."""
    return {name for name in torch._C._dispatch_get_registrations_for_dispatch_key(key) if name.startswith("aten::")}


def _overload(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _autocast(op: Any, policy: Policy | None, before: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel. before: what the CPU had in its place, if anything."""
    if not any(simulated_cuda_device(tensor) is not None for tensor in _tensors([*args, *kwargs.values()])):
        if before is not None:
            return before.call_boxed(keys, *args, **kwargs)
        policy = None
    if policy is None:
        # Below the compiler's own dispatcher too, which would come back here.
        return op.redispatch(keys.remove(AUTOCAST).remove(torch._C.DispatchKey.PythonDispatcher), *args, **kwargs)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(AUTOCAST)):
        return _run(policy, op, args, kwargs)


def _run(policy: Policy, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if policy is Policy.BANNED:
        raise ModelError("model: binary_cross_entropy is not safe in half precision, and CUDA's autocast refuses it; "
                         "use binary_cross_entropy_with_logits in the model, or write precision=fp32")
    if policy is Policy.SET_DTYPE:
        return _set_dtype(op, args, kwargs)
    given = _tensors([*args, *kwargs.values()])
    wide = policy is Policy.PROMOTE and any(tensor.dtype == torch.float32 for tensor in given)
    dtype = torch.float32 if wide or policy is Policy.FP32 else torch.get_autocast_dtype("cpu")
    return op(*_cast(dtype, args), **{name: _cast(dtype, value) for name, value in kwargs.items()})


def _set_dtype(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = [argument.name for argument in op._schema.arguments].index("dtype")
    given = kwargs.get("dtype") if len(args) <= place else args[place]
    if given is None and _eligible(args[0]):
        args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
    return op(*args, **kwargs)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast(dtype, part) for part in value)
    return value.to(dtype) if _eligible(value) else value


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)

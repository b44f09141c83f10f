"""In-place gradient accumulation that autograd does, and skips under a dispatch mode; put back here.

Autograd adds gradients that meet in one place into the first of them, if nothing else holds it, and puts the gradients
of picked elements into zeros of its own (torch/csrc/autograd/input_buffer.cpp, FunctionsManual.cpp). Under a dispatch
mode it does neither, as no mode is known to allow it. What listens then puts the in-place op back.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

INTO_ZEROS = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
}
"""Ops of the backward pass whose first argument is zeros made for them."""

SUMS = {aten.add.Tensor, *INTO_ZEROS}

ZEROS = ("aten.zeros", "aten.new_zeros")


def without_a_mode(func: Any, args: tuple[Any, ...], made_by: str, alone: tuple[int, int]) -> Any:
    """The op that autograd would run in place of `func`, one of SUMS, if no mode listened; called in its node.

    made_by: the op that made the first argument. alone: what `counts_of_a_gradient` gave.
    """
    first = args[0]
    if func is not aten.add.Tensor:
        return INTO_ZEROS[func] if made_by.startswith(ZEROS) else func
    other = args[1]
    alike = isinstance(other, Tensor) and first.shape == other.shape and first.dtype == other.dtype
    if alike and is_non_overlapping_and_dense_or_false(first) and _counts(first) == alone:
        return aten.add_.Tensor
    return func


@functools.cache
def counts_of_a_gradient() -> tuple[int, int]:
    """Reference counts of a gradient that only autograd holds, and of its memory, as a mode is handed it.

    Tried, for it hangs on how torch calls a mode.
    """
    found: list[tuple[int, int]] = []
    watched = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.add.Tensor and not torch.is_grad_enabled():
                found.append(_counts(args[0]))
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                watched.append(weakref.ref(result.untyped_storage()))  # as one who follows memory does
            return result

    with torch.inference_mode(False), torch.enable_grad(), Listen():  # type: ignore[no-untyped-call]
        x = torch.ones(2, requires_grad=True)
        y = x * 2.0
        (y.exp() + y.sin()).sum().backward()
    return found[-1]


def _counts(tensor: Any) -> tuple[int, int]:
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

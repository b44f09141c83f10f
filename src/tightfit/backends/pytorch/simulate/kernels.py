"""Ops that torch composes, or shapes, otherwise for a device's tensors than for fake ones on the CPU.

Where an op is composed of others, torch asks for the device while it composes. Here the composition for the device
stands in for the tensors of a `target.PlanningMode`, above autograd, so that what is saved for the backward pass is
what the device saves. Ops that are not composed keep their shape rules, but for those in the tables at the end.

Read from torch 2.13's aten/src/ATen/native (transformers/attention.cpp, Dropout.cpp, SoftMax.cpp, layer_norm.cpp), and
the same in 2.11. Left for CUDA as on the CPU: convolutions, recurrent layers, batch and group normalization, and
everything under `torch.inference_mode`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate.cuda.sdpa import Call, allowed_kernels, choose
from tightfit.backends.pytorch.techniques.attention.kernels import HALF
from tightfit.devices import Device

aten = torch.ops.aten


def _attention(
    device: Device, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    kernel = choose(call, device, allowed_kernels())
    if kernel == "flash":
        size = query.shape[-1]
        scale = size**-0.5 if scale is None else scale
        padded = (F.pad(t, (0, -size % 8)) if size % 8 else t for t in (query, key, value))
        output: Tensor = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
        return output[..., :size] if size % 8 else output
    if kernel == "cudnn":
        bias = _additive(attn_mask, query.dtype, -65504.0)
        results = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, call.learns, dropout_p, is_causal, False, scale=scale
        )
    else:
        bias = _additive(attn_mask, query.dtype, -torch.inf)
        if kernel == "math":
            return _math_attention(query, key, value, bias, dropout_p, is_causal, scale, enable_gqa)
        if bias is not None:
            bias = _aligned(bias).expand(*query.shape[:3], key.shape[2])
        results = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, call.learns, dropout_p, is_causal, scale=scale
        )
    first: Tensor = results[0]
    return first


def _additive(mask: Tensor | None, dtype: torch.dtype, hidden: float) -> Tensor | None:
    """A mask of booleans as what is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(hidden, dtype=dtype, device=mask.device))


def _aligned(bias: Tensor) -> Tensor:
    """The efficient kernel reads a mask in rows of 8: where they are not, a padded copy is made."""
    if bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1]):
        return bias
    keys = bias.shape[-1]
    return F.pad(bias, (0, 8 - keys % 8))[..., :keys]


def _math_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, causal: bool, scale: float | None,
    grouped: bool,
) -> Tensor:  # fmt: skip
    """The unfused kernel. torch's own composition takes fake tensors for a reason not to add the mask in place.

    Names live as long as those of torch's C++ do (transformers/attention.cpp), for so does what they hold.
    """
    dtype = query.dtype
    wide_query, wide_key, wide_value = query, key, value
    if dtype in HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        wide_query, wide_key, wide_value = query.float(), key.float(), value.float()
    root = (query.shape[-1] ** -0.5 if scale is None else abs(scale)) ** 0.5
    scaled_query = wide_query * (-root if scale is not None and scale < 0 else root)
    if causal:
        bias = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        bias = _additive(bias, scaled_query.dtype, -torch.inf)
    each_key, each_value = wide_key, wide_value
    if grouped and query.shape[-3] != key.shape[-3]:
        each_key = wide_key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        each_value = wide_value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = scaled_query @ (each_key.transpose(-2, -1) * root)
    if bias is not None:  # as torch does: in place, unless a mode listens, such as selective checkpointing's
        weights = weights.add(bias) if _other_modes() else weights.add_(bias)
    weights = aten._safe_softmax(weights, -1)
    if dropout > 0.0:
        weights = torch.dropout(weights, dropout, True)
    returned = weights.to(dtype)  # returned with the output, and made before it; the caller drops it
    output: Tensor = (weights @ each_value).to(dtype)
    del returned
    return output


def _other_modes() -> bool:
    """Whether a mode listens that would also listen to real tensors: neither the fake tensors' own nor a tracker."""
    return any(not isinstance(mode, FakeTensorMode | Tracker) for mode in _get_current_dispatch_mode_stack())


def _dropout(device: Device, input: Tensor, p: float, train: bool) -> Any:  # noqa: A002
    """CUDA's dropout is one kernel, which saves a mask of one byte for an element."""
    if train and 0 < p < 1 and input.numel():
        return aten.native_dropout(input, p, train)[0]
    return NotImplemented


def _softmax(fused: Any, device: Device, self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """CUDA's kernel reads fp16 and writes fp32, with no copy in between. Not so for bf16."""
    if self.dtype == torch.float16 and dtype == torch.float32:
        return fused(self, dim, True)
    return NotImplemented


def _rms_norm(
    device: Device, input: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None  # noqa: A002
) -> Any:
    """One kernel on CUDA, where input and weight have one format."""
    if input.is_complex() or (weight is not None and weight.dtype != input.dtype):
        return NotImplemented
    norm: Any = _FusedRmsNorm
    return norm.apply(input, tuple(shape), weight, eps)


class _FusedRmsNorm(torch.autograd.Function):
    """The kernel and its gradient: torch has these formulas for CUDA tensors alone."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, shape: tuple[int, ...], weight: Tensor | None, eps: float | None) -> Any:  # noqa: A002
        with torch._C._AutoDispatchBelowAutograd():
            output, rstd = aten._fused_rms_norm(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape = shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, weight, rstd = ctx.saved_tensors  # noqa: A001
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            found = aten._fused_rms_norm_backward(gradients[0], input, ctx.shape, rstd, weight, needed)
        return found[0], None, found[1], None


# Shape rules of single ops: each takes the op's arguments.


def _normalized(source: Tensor, shape: Sequence[int], wide: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's normalization, mean and deviation, these in fp32 where `wide`, else in the input's format."""
    rows = [*source.shape[: source.dim() - len(shape)], *(1 for _ in shape)]
    dtype = torch.float32 if wide else source.dtype
    output = torch.empty_like(source, memory_format=torch.contiguous_format)
    return output, source.new_empty(rows, dtype=dtype), source.new_empty(rows, dtype=dtype)


def _cuda_layer_norm(source: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    return _normalized(source, shape, source.dtype in HALF)


def _cpu_layer_norm(source: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """Statistics are fp32 where an input in half precision meets a weight in fp32 (layer_norm.cpp)."""
    return _normalized(source, shape, any(t is not None and t.dtype != source.dtype for t in (weight, bias)))


def _layer_norm_gradient_rule(
    gradient: Tensor, source: Tensor, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, needed: Sequence[bool],
) -> Any:  # fmt: skip
    """Gradients lie in one piece, however the gradient that comes in does."""
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) if need and t is not None else None
                 for t, need in zip((source, weight, bias), needed, strict=True))


def _rms_norm_rule(source: Tensor, shape: list[int], weight: Any = None, eps: Any = None) -> Any:
    return _normalized(source, shape, source.dtype in HALF)[:2]


def _rms_norm_gradient_rule(gradient: Tensor, source: Tensor, shape: Any, rstd: Any, weight: Any, needed: Any) -> Any:
    found = torch.empty_like(source) if needed[0] else None
    return found, torch.empty_like(weight) if needed[1] and weight is not None else None


def _grouped_mm_rule(
    first: Tensor, second: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """A matrix product for each group, of 2-D and 3-D operands: torch's own rule takes bf16 alone, its kernels take
    other formats one group after another."""
    dtype = out_dtype or first.dtype
    flat = (first.dim() == 2, second.dim() == 2)
    shape: tuple[int, ...]
    if flat == (True, True):
        assert offs is not None
        shape = (offs.shape[0], first.shape[0], second.shape[1])
    elif flat == (True, False):
        shape = (first.shape[0], second.shape[-1])
    elif flat == (False, True):
        shape = (first.shape[1], second.shape[1])
    else:
        shape = (first.shape[0], first.shape[1], second.shape[-1])
    row = -(-shape[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize  # rows begin at multiples of 16 bytes
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return first.new_empty_strided(shape, strides, dtype=dtype)


def _addmm_in_rule(*_: Any, out: Tensor, **__: Any) -> Tensor:
    """A product added in a wider format, where it lies: torch 2.11's own rule takes the format for a factor."""
    return out


CUDA_COMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.dropout.default: _dropout,
    aten.softmax.int: partial(_softmax, aten._softmax),
    aten.log_softmax.int: partial(_softmax, aten._log_softmax),
    aten.rms_norm.default: _rms_norm,
}
"""By op; each takes the device and the op's arguments, and gives NotImplemented to leave a call to the op's own."""
CUDA_SHAPES: Mapping[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _cuda_layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_gradient_rule,
    aten._fused_rms_norm.default: _rms_norm_rule,
    aten._fused_rms_norm_backward.default: _rms_norm_gradient_rule,
    aten._grouped_mm.default: _grouped_mm_rule,
    aten.addmm.dtype_out: _addmm_in_rule,
}
CPU_SHAPES: Mapping[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _cpu_layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_gradient_rule,
    aten._grouped_mm.default: _grouped_mm_rule,
}

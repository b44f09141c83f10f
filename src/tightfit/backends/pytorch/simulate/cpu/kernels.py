"""Results of the CPU's kernels where torch's shape rules, or its decompositions for fake tensors, differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tightfit.backends.pytorch.simulate.cuda.kernels import additive, grouped_mm_rule, math_attention
from tightfit.devices import Device

aten = torch.ops.aten


def _math(
    device: Device, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, dropout_mask: Tensor | None = None, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention of matrix products and a softmax, which runs where the fused kernel cannot: with dropout, or a mask
    that learns. It adds the mask in place for real tensors, and not for fake ones."""
    if dropout_mask is not None:
        return NotImplemented
    bias = additive(attn_mask, query.dtype, -torch.inf)
    output = math_attention(query, key, value, bias, dropout_p, is_causal, scale, enable_gqa)
    return output, output


COMPOSITIONS: dict[Any, Callable[..., Any]] = {aten._scaled_dot_product_attention_math.default: _math}

def _layer_norm_rule(
    input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float,  # noqa: A002
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Statistics are fp32 where an input in half precision meets a weight in fp32 (layer_norm.cpp)."""
    mixed = any(t is not None and t.dtype != input.dtype for t in (weight, bias))
    rows = [*input.shape[: input.dim() - len(shape)], *(1 for _ in shape)]
    dtype = torch.float32 if mixed else input.dtype
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    return output, input.new_empty(rows, dtype=dtype), input.new_empty(rows, dtype=dtype)


SHAPE_RULES: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _layer_norm_rule,
    aten._grouped_mm.default: grouped_mm_rule,
}
"""Each takes the op's arguments."""

"""What the CPU's kernels give where torch's shape rules, or its compositions for fake tensors, say otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightfit.backends.pytorch.cuda_target.kernels import additive, grouped_mm_rule, math_attention
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


SHAPE_RULES: dict[Any, Callable[..., Any]] = {aten._grouped_mm.default: grouped_mm_rule}
"""Each takes the op's arguments."""

"""Floating-point operations of tensor contractions, from shapes: 2 for each multiply-add.

Formulas by op name. An op that none of them knows is looked up in `torch.utils.flop_counter`'s registry, whose formulas
fail for products with a format of their own, and count too much where convolutions have groups and attention a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from torch.utils.flop_counter import flop_registry

Arguments = tuple[Any, ...]
Formula = Callable[[Any, Arguments, dict[str, Any], Any], int]


def registered_flops(func: Any) -> Formula | None:
    """torch's own formula for an op that has one."""
    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    if formula is None:
        return None

    def flops(func: Any, args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
        return int(formula(*args, **kwargs, out_val=result))

    return flops


def argument(func: Any, args: Arguments, kwargs: dict[str, Any], name: str) -> Any:
    """The value an op was given for the argument of that name, by place or by name; None where it has none such."""
    if name in kwargs:
        return kwargs[name]
    for position, declared in enumerate(func._schema.arguments):
        if declared.name == name:
            return args[position] if position < len(args) else declared.default_value
    return None


def _product(first: int) -> Formula:
    """Two matrices, or stacks of them, beginning at argument `first`: (..., M, K) by (..., K, N)."""

    def flops(func: Any, args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
        return 2 * int(args[first].numel()) * int(args[first + 1].shape[-1])

    return flops


def _linear(func: Any, args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Input (..., K) by a weight (N, K)."""
    return 2 * int(args[0].numel()) * int(args[1].shape[0])


def _grouped(func: Any, args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Groups of rows, or of columns, each by its own matrix: (M, K) by (G, K, N); (M, K) by (K, N) in groups of K;
    (G, M, K) by (K, N) in groups of N."""
    a, b = args[0], args[1]
    if a.ndim == 3 and b.ndim == 2:
        return 2 * int(a.shape[-2]) * int(b.numel())
    return 2 * int(a.numel()) * int(b.shape[-1])


def _convolution_backward(func: Any, args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of a backward op: as many as forward for each of the two gradients asked for, the input's and the
    weight's, also of a convolution in groups, for which torch's formula counts every pair of channels."""
    places = args[1] if argument(func, args, kwargs, "transposed") else args[0]
    wanted = sum(map(bool, argument(func, args, kwargs, "output_mask")[:2]))
    return 2 * int(places.numel()) * int(prod(args[2].shape[1:])) * wanted


@functools.cache
def attended_pairs(queries: int, keys: int, causal: bool, left: int = -1, right: int = -1) -> int:
    """Pairs of a query and a key that attention works on.

    causal: query i sees keys up to i. left, right: how many positions a window reaches; -1 is all.
    """
    at = np.arange(queries)
    reach = 0 if causal else right
    last = keys if reach < 0 else np.minimum(at + reach + 1, keys)
    first = 0 if left < 0 else np.maximum(at - left, 0)
    return int(np.maximum(np.broadcast_to(last - first, queries), 0).sum())


def _attention(first: int, of_keys: int, of_values: int, heads_at: int = 1) -> Formula:
    """Attention over query, key and value (B, H, T, D), or (B, T, H, D) with `heads_at` 2, from argument `first` on;
    (tokens, H, D) with offsets of documents. of_keys, of_values: products over the features of the keys and the values.
    """

    def flops(func: Any, args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
        query, key, value = args[first : first + 3]
        if query.ndim == 3:
            offsets = _first_given(func, args, kwargs, "cu_seq_q", "cum_seq_q", "cu_seqlens_q")
            documents = 1 if offsets is None else max(int(offsets.shape[0]) - 1, 1)
            queries, keys = (max(round(t.shape[0] / documents), 1) for t in (query, key))
            rows, heads = query.shape[0] / queries, int(query.shape[1])
        else:
            rows, heads = int(query.shape[0]), int(query.shape[heads_at])
            queries, keys = int(query.shape[3 - heads_at]), int(key.shape[3 - heads_at])
        pairs: int = round(rows * heads * attended_pairs(queries, keys, *_shape_of_mask(func, args, kwargs)))
        return 2 * pairs * (of_keys * int(query.shape[-1]) + of_values * int(value.shape[-1]))

    return flops


def _shape_of_mask(func: Any, args: Arguments, kwargs: dict[str, Any]) -> tuple[bool, int, int]:
    """Whether an attention op is causal, and how far its window reaches left and right; -1 is all."""
    causal = bool(_first_given(func, args, kwargs, "is_causal", "causal", "custom_mask_type"))
    window = argument(func, args, kwargs, "window_size")
    if window is None:
        window = [argument(func, args, kwargs, f"window_size_{side}") for side in ("left", "right")]
    left, right = (-1 if reach is None else int(reach) for reach in window)
    return causal, left, right


def _first_given(func: Any, args: Arguments, kwargs: dict[str, Any], *names: str) -> Any:
    return next((v for v in (argument(func, args, kwargs, name) for name in names) if v is not None), None)


SCORES_AND_VALUES = (1, 1)
"""Attention's forward pass: scores, and the weighted sum of values."""
SCORES_AND_GRADIENTS = (3, 2)
"""Its backward pass: scores again, and the gradients of queries and keys; those of weights and values."""

FLOPS: dict[str, Formula] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm", "_int_mm"), _product(0)),
    **dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_", "_addmm_activation"), _product(1)),
    "linear": _linear, "mkldnn_linear": _linear,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback"), _grouped),
    **{
        f"{name}{suffix}": formula
        for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
                     "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
                     "_varlen_attn")
        for suffix, formula in (("", _attention(0, *SCORES_AND_VALUES)),
                                ("_backward", _attention(1, *SCORES_AND_GRADIENTS)))
    },
    "_varlen_attn_out": _attention(1, *SCORES_AND_VALUES),
    **{
        f"{name}_{direction}": formula
        for name in ("_flash_attention", "_efficient_attention", "_flash_attn", "_flash_attn_varlen")
        for direction, formula in (("forward", _attention(0, *SCORES_AND_VALUES, heads_at=2)),
                                   ("backward", _attention(1, *SCORES_AND_GRADIENTS, heads_at=2)))
    },
}  # fmt: skip
"""Formulas by an op's name without its namespace; `_flash_attn` is the flash-attn library's."""

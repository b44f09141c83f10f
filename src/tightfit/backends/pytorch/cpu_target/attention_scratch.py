"""Memory that the CPU's fused attention asks for and gives back while it runs (cpu/FlashAttentionKernel.cpp)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tightfit.backends.pytorch.cpu_target.products import attention_products, packs_attention
from tightfit.backends.pytorch.formats import HALF

Arguments = tuple[Any, ...]

PACKED_FROM = 64
"""Queries, and keys, from which on attention's factors are packed."""


def attention(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """A block of scores, two values a row and a block of output in every thread, in fp32; in half precision the
    block of scores once more; and a mask whose rows are not in one piece (cpu/FlashAttentionKernel.cpp,
    cpu_flash_attention)."""
    query, value = args[0], args[2]
    rows, keys = _blocks(query, value)
    values = rows * (keys + 2 + query.shape[-1]) * _wide(query)
    packed = packs_attention(query.dtype) and query.shape[2] >= PACKED_FROM and value.shape[2] >= PACKED_FROM
    even = keys + keys % 2 if packed else keys
    halves = rows * even * query.element_size() if query.dtype in HALF else 0
    copies = _packed(query, rows, int(value.shape[2]), keys) if packed else 0
    return int(torch.get_num_threads() * (values + halves)) + copies + _mask_copy(kwargs)


def _packed(query: Tensor, rows: int, keys: int, block: int) -> int:
    """Copies of all keys and values in the order that the processor's matrix instructions read: an even number of
    them, and of values in a key; a block that is turned in every thread, and one of queries where they become even."""
    batch, heads, _, size = query.shape
    wide, (full, tail) = size + size % 2, divmod(keys - 1, block)
    ordered = batch * heads * (keys * wide + (full * (block + block % 2) + tail + 1 + (tail + 1) % 2) * size)
    turned = block * size + (rows * wide if size % 2 else 0)
    return int(ordered + torch.get_num_threads() * turned) * query.element_size()


def attention_backward(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """A block of weights and one of their gradients in every thread, in half precision in both formats, and one sum a
    row (cpu/FlashAttentionKernel.cpp, cpu_flash_attention_backward). Of the sums, the profiler sees one thread's."""
    gradient, query, value = args[0], args[1], args[3]
    rows, keys = _blocks(query, value)
    halves = query.element_size() if query.dtype in HALF else 0
    total = torch.get_num_threads() * 2 * rows * keys * (_wide(query) + halves) + rows * _wide(query)
    if not gradient.transpose(1, 2).is_contiguous():
        total += gradient.numel() * gradient.element_size()
    return int(total) + attention_products(query, rows, keys) + _mask_copy(kwargs)


def _mask_copy(kwargs: dict[str, Any]) -> int:
    """The copy of an attention mask whose rows are not in one piece, such as T5's positions' biases."""
    mask = kwargs.get("attn_mask")
    return 0 if mask is None or mask.stride(-1) == 1 or mask.shape[-1] == 1 else int(mask.numel() * mask.element_size())


def _blocks(query: Tensor, value: Tensor) -> tuple[int, int]:
    """Queries and keys that one block of scores holds."""
    queries, keys = query.shape[2], value.shape[2]
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _wide(tensor: Tensor) -> int:
    return max(tensor.element_size(), 4)

"""The ops whose speed is measured, each at a number of elements: one for each family of `calibration.FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tightfit.backends.pytorch.ceilings.timer import Call

Case = Callable[[Tensor, Tensor], Call]
"""Makes a call from two vectors of as many elements each, of values around 1."""

ROW = 512
"""Features of a row, for ops over rows."""
PARTS = 16
"""Tensors in a list, for multi-tensor ops."""

aten = torch.ops.aten


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, min(ROW, x.numel()))


def _softmax_backward(x: Tensor, y: Tensor) -> Call:
    output = torch.softmax(_rows(x), -1)
    return lambda: aten._softmax_backward_data(_rows(y), output, -1, x.dtype)


def _log_softmax_backward(x: Tensor, y: Tensor) -> Call:
    output = torch.log_softmax(_rows(x), -1)
    return lambda: aten._log_softmax_backward_data(_rows(y), output, -1, x.dtype)


def _layer_norm(x: Tensor, y: Tensor) -> Call:
    rows, weight = _rows(x), _rows(y)[0]
    return lambda: torch.native_layer_norm(rows, rows.shape[1:], weight, weight, 1e-5)


def _layer_norm_backward(x: Tensor, y: Tensor) -> Call:
    rows, weight = _rows(x), _rows(y)[0]
    _, mean, deviation = torch.native_layer_norm(rows, rows.shape[1:], weight, weight, 1e-5)
    shape, all_three = list(rows.shape[1:]), [True, True, True]
    return lambda: aten.native_layer_norm_backward(
        _rows(y), rows, shape, mean, deviation, weight, weight, all_three)


def _embedding(x: Tensor, y: Tensor) -> Call:
    table = _rows(x)
    ids = torch.randint(table.shape[0], (table.shape[0],), device=x.device)
    return lambda: F.embedding(ids, table)


def _embedding_backward(x: Tensor, y: Tensor) -> Call:
    gradient = _rows(y)
    ids = torch.randint(gradient.shape[0], (gradient.shape[0],), device=x.device)
    return lambda: aten.embedding_dense_backward(gradient, ids, gradient.shape[0], -1, False)


def _foreach(x: Tensor, y: Tensor) -> Call:
    parts = list(x.chunk(PARTS))
    return lambda: torch._foreach_mul_(parts, 1.0)


def _fused_adamw(x: Tensor, y: Tensor) -> Call:
    weights, gradients, means, squares = (
        list(t.chunk(PARTS)) for t in (x, y, torch.zeros_like(x), torch.ones_like(x)))
    steps = [torch.ones((), device=x.device) for _ in weights]
    options: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False,
                               "maximize": False}
    return lambda: torch._fused_adamw_(weights, gradients, means, squares, [], steps, lr=1e-3, **options)


def _where(x: Tensor, y: Tensor) -> Call:
    chosen = torch.rand(x.shape, device=x.device) > 0.5
    return lambda: torch.where(chosen, x, y)


def _transposed_copy(x: Tensor, y: Tensor) -> Call:
    """As attention's heads are brought together: (T, H, D) to (H, T, D)."""
    heads = x.view(-1, 4, 32).transpose(0, 1)
    return lambda: heads.clone(memory_format=torch.contiguous_format)


def _cast(x: Tensor, y: Tensor) -> Call:
    other = torch.bfloat16 if x.dtype == torch.float32 else torch.float32
    return lambda: x.to(other)


CASES: Mapping[str, Case] = {
    "add": lambda x, y: lambda: x + y,
    "add_": lambda x, y: lambda: x.add_(y, alpha=0.0),
    "sqrt": lambda x, y: x.sqrt,
    "pow": lambda x, y: lambda: x.pow(2.0),
    "tanh": lambda x, y: x.tanh,
    "gelu": lambda x, y: lambda: F.gelu(x),
    "gelu_backward": lambda x, y: lambda: aten.gelu_backward(y, x),
    "silu": lambda x, y: lambda: F.silu(x),
    "silu_backward": lambda x, y: lambda: aten.silu_backward(y, x),
    "exp": lambda x, y: x.exp,
    "gt": lambda x, y: lambda: x > y,
    "where": _where,
    "_softmax": lambda x, y: lambda: torch._softmax(_rows(x), -1, False),
    "_safe_softmax": lambda x, y: lambda: torch._safe_softmax(_rows(x), -1),
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax": lambda x, y: lambda: torch._log_softmax(_rows(x), -1, False),
    "_log_softmax_backward_data": _log_softmax_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "sum": lambda x, y: lambda: _rows(x).sum(0),
    "mean": lambda x, y: lambda: _rows(x).mean(-1),
    "linalg_vector_norm": lambda x, y: lambda: torch.linalg.vector_norm(x),
    "clone": _transposed_copy,
    "cat": lambda x, y: lambda: torch.cat((x, y)),
    "_to_copy": _cast,
    "zeros": lambda x, y: lambda: torch.zeros_like(x),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "bernoulli_": lambda x, y: lambda: x.bernoulli_(0.9),
    "_foreach_mul_": _foreach,
    "_fused_adamw_": _fused_adamw,
}

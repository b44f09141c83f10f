"""The ops whose speed is measured, each at a number of elements: one for each family of `calibration.FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tightfit.backends.pytorch.measure.calibration.timer import Call

Case = Callable[[Tensor, Tensor], Call]
"""Makes a call from two vectors of as many elements each, of values around 1."""

ROW = 512
"""Features of a row, for ops over rows."""
PARTS = 16
"""Tensors in a list, for multi-tensor ops."""

aten = torch.ops.aten


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, min(ROW, x.numel()))


def _layer_norm(x: Tensor, y: Tensor) -> Call:
    rows, weight = _rows(x), _rows(y)[0]
    return lambda: torch.native_layer_norm(rows, rows.shape[1:], weight, weight, 1e-5)


def _embedding(x: Tensor, y: Tensor) -> Call:
    table = _rows(x)
    ids = torch.randint(table.shape[0], (table.shape[0],), device=x.device)
    return lambda: F.embedding(ids, table)


def _foreach(x: Tensor, y: Tensor) -> Call:
    parts = list(x.chunk(PARTS))
    return lambda: torch._foreach_mul_(parts, 1.0)


def _fused_adamw(x: Tensor, y: Tensor) -> Call:
    weights, gradients, means, squares = (list(t.chunk(PARTS)) for t in (x, y, torch.zeros_like(x), torch.ones_like(x)))
    steps = [torch.ones((), device=x.device) for _ in weights]
    options: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False,
                               "maximize": False}
    return lambda: torch._fused_adamw_(weights, gradients, means, squares, [], steps, lr=1e-3, **options)


def _where(x: Tensor, y: Tensor) -> Call:
    chosen = torch.rand(x.shape, device=x.device) > 0.5
    return lambda: torch.where(chosen, x, y)


CASES: Mapping[str, Case] = {
    "add": lambda x, y: lambda: x + y,
    "add_": lambda x, y: lambda: x.add_(y, alpha=0.0),
    "sqrt": lambda x, y: x.sqrt,
    "tanh": lambda x, y: x.tanh,
    "gelu": lambda x, y: lambda: F.gelu(x),
    "silu": lambda x, y: lambda: F.silu(x),
    "where": _where,
    "_softmax": lambda x, y: lambda: torch._softmax(_rows(x), -1, False),
    "_safe_softmax": lambda x, y: lambda: torch._safe_softmax(_rows(x), -1),
    "native_layer_norm": _layer_norm,
    "sum": lambda x, y: lambda: _rows(x).sum(0),
    "zeros": lambda x, y: lambda: torch.zeros_like(x),
    "embedding": _embedding,
    "bernoulli_": lambda x, y: lambda: x.bernoulli_(0.9),
    "_foreach_mul_": _foreach,
    "_fused_adamw_": _fused_adamw,
}

"""Answers of fake tensors to code that reads a value out of one: one table.

A step on fake tensors has shapes and no values, so a read has no true answer. These keep the step on the path that a
healthy run takes:

| who reads | answer | why |
|---|---|---|
| `GradScaler._maybe_opt_step` | 0 | no gradient overflowed: the optimizer steps |
| transformers' checks whether a mask hides nothing | False where rows are padded, else True | a mask is only given where it hides something; what a model makes itself for want of one hides nothing |
| any `bool` of `all` or `isfinite` | True | a check finds everything right, rows hold one document |
| any other `bool(tensor)` | False | the branch left out: layerdrop keeps its layer, a check finds nothing wrong |
| any other number | 1 | a denominator, a factor and a norm that change nothing |
| `torch.equal` | True | two ways to the same shape |

transformers takes fake tensors for real ones here, for else it builds masks that real runs go without.

A result whose very shape hangs on values (`nonzero`, `unique`) has no answer here: the step is then refused, by the
module and the op that asked.
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.utils import import_utils

from tightfit.backends.pytorch.model_size import READS
from tightfit.backends.pytorch.replaced import replaced

BY_READER: dict[str, float] = {
    "GradScaler._maybe_opt_step.<locals>.<genexpr>": 0.0,  # its own sum, not what the optimizer reads inside it
}
"""Answers by the qualified name of a function on the reader's stack."""

MASK_READERS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", "_can_skip_bidirectional_mask_xpu")
"""Functions that ask whether a mask hides nothing."""

CHECKS = ("aten.all.", "aten._is_all_true.", "aten.isfinite.")
"""Ops whose result is true when nothing is wrong."""


def answer(func: Any, args: tuple[Any, ...], maker: Callable[[Tensor], str], *, padded: bool = True) -> Any:
    """The table's answer to an op that reads a value; NotImplemented for any other op.

    maker: names the op that made a tensor. padded: whether rows end in padding.
    """
    if func is torch.ops.aten.equal.default:
        return args[0].shape == args[1].shape
    if func not in READS:
        return NotImplemented
    if getattr(args[0], "constant", None) is not None:  # a number that hangs on no value: fake tensors know it
        return NotImplemented
    dtype = args[0].dtype
    if dtype == torch.bool:
        return bool(_by_reader(1.0 if maker(args[0]).startswith(CHECKS) else 0.0, padded))
    value = _by_reader(1.0, padded)
    return value if dtype.is_floating_point else int(value)


def hide_fakeness() -> AbstractContextManager[None]:
    """Context in which transformers takes fake tensors for real ones. A private interface, named here alone; without
    it masks of some models come out larger than they are."""
    if not hasattr(import_utils, "is_fake_tensor"):
        return nullcontext()
    return replaced(import_utils, "is_fake_tensor", lambda tensor: False)


def _by_reader(otherwise: float, padded: bool) -> float:
    frame = sys._getframe(1)
    while frame is not None:
        reader = frame.f_code.co_qualname
        if reader in MASK_READERS:
            return float(not padded)
        found = BY_READER.get(reader)
        if found is not None:
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return otherwise

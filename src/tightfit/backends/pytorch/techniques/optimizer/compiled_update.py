"""The update of `anyprecision` as one function of a parameter, for torch.compile to make one kernel of.

Op by op an update reads and writes each value of a bf16 weight some thirty times, as fp32; in one kernel each tensor is
read once and written once, and nothing is kept beside them. Rounding is arithmetic on bits here, since a compiler takes
a cast to bf16 and back for none at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tightfit.backends.pytorch.build import Build
from tightfit.techniques.precision import Rounding

FRACTIONS = 1 << 16
"""Values of fp32 from one bf16 number to the next."""
COMPILED_VALUES = 1 << 20
"""Values of a parameter from which on a kernel of its own pays: fewer are updated as lists of tensors."""
STRIDE = 40503
"""The golden ratio's share of `FRACTIONS`, odd: its multiples visit every fraction once, evenly at all times."""

Update = Callable[..., None]


def compiled_update(build: Build) -> Update | None:
    """`update` compiled, of a recipe that compiles by Inductor; None of the others, and of several processes, whose
    parts of a weight may lie on the processor."""
    compiles = build.recipe.compile
    if getattr(compiles, "backend", None) != "inductor" or build.recipe.parallel.process_count > 1:
        return None
    backend: Any = "inductor" if build.compile_backend is None else build.compile_backend("inductor", "default")
    return torch.compile(update, fullgraph=True, dynamic=False, backend=backend)


def any_number_of_shapes() -> AbstractContextManager[None]:
    """Context without Dynamo's recompile limit: a function is compiled once for each shape of parameter."""
    from torch._dynamo.utils import disable_cache_limit  # takes seconds

    return disable_cache_limit()


def scalars(step: int, lr: float, betas: tuple[float, float], weight_decay: float) -> tuple[Tensor, ...]:
    """The hyperparameters of one step as 0-dim tensors, whose new values cause no recompilation: `rate`, `root`,
    `decay` and `offset` of `update`."""
    beta1, beta2 = betas
    numbers = (-lr / (1 - beta1**step), math.sqrt(1 - beta2**step), lr * weight_decay)
    return *(torch.tensor(number) for number in numbers), torch.tensor(step * STRIDE % FRACTIONS, dtype=torch.int32)


def update(
    weight: Tensor, gradient: Tensor, momentum: Tensor, variance: Tensor, compensation: Tensor | None,
    rate: Tensor, root: Tensor, decay: Tensor, offset: Tensor, *,
    betas: tuple[float, float], eps: float, rounding: Rounding,
) -> None:  # fmt: skip
    """One step of one parameter, in place; see `anyprecision` for the formula.

    rate: the learning rate over the first moment's correction, negative. root: of the second's. decay: the share of a
    weight that it loses. offset: added to the bits of bf16 states before the rest is cut off.
    """
    full = torch.promote_types(weight.dtype, torch.float32)
    wide, gradient = weight.to(full), gradient.to(full)
    mean = momentum.to(full).lerp(gradient, 1 - betas[0])
    square = variance.to(full) * betas[1] + (1 - betas[1]) * gradient * gradient
    change = rate * mean / (square.sqrt() / root + eps)
    _store(momentum, mean, offset)
    _store(variance, square, offset)
    if compensation is not None:
        change = compensation.to(full) - decay * wide + change
        rounded = _nearest(wide + change)
        weight.copy_(rounded)
        _store(compensation, change + (wide - rounded), offset)
        return
    wide = wide * (1 - decay) + change
    if weight.dtype is torch.bfloat16:
        wide = _cut(wide, torch.randint(FRACTIONS, wide.shape, dtype=torch.int32, device=wide.device)) \
            if rounding == "stochastic" else _nearest(wide)
    weight.copy_(wide)


def _store(kept: Tensor, value: Tensor, offset: Tensor) -> None:
    """Write a state to its own format, a bf16 one rounded by the walking offset."""
    kept.copy_(_cut(value, offset) if kept.dtype is torch.bfloat16 else value)


def _nearest(value: Tensor) -> Tensor:
    """fp32 values rounded to the nearest bf16 ones, ties to even."""
    return _cut(value, 0x7FFF + ((value.float().view(torch.int32) >> 16) & 1))


def _cut(value: Tensor, more: Tensor) -> Tensor:
    """fp32 values with something added to their bits, and without those that bf16 ones lack."""
    cut = ((value.float().view(torch.int32) + more) & -FRACTIONS).view(torch.float32)
    return torch.where(value.isnan(), value, cut)  # a GPU's has all its bits set, and would become a zero

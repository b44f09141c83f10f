"""AdamW whose states have formats of their own, for fp32 and for bf16 weights.

One step t of a parameter w with gradient g, all in fp32 (fp64 for fp64 weights), states read from and written to
their own formats:

    m = b1 m + (1 - b1) g                v = b2 v + (1 - b2) g g
    u = -lr (wd w + m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps))
    w = w + u

A bf16 weight has 8 bits of mantissa, so w + u is rounded, by one of:

    kahan        y = c + u;  w' = bf16(w + y);  c = (w - w') + y, with c kept in bf16 (Kahan 1965)
    stochastic   up or down at random, in proportion, so that the mean is exact (Gupta et al. 2015)
    nearest      an update below half the last bit is lost

The scheme of formats and the compensation are those of torchdistX's AnyPrecisionAdamW. Two things differ: sums are
taken in fp32, and what is kept in bf16 (m, v, c) is not rounded to the nearest. At b2 = 0.999 a decay of one part in
a thousand is below half of bf16's last bit, so that rounded to the nearest v would never fall: after gradients shrink
tenfold, its root is four times too large 3,000 steps later. Here an offset that walks through all 65,536 fractions of
the last bit is added before the rest is cut off: rounding is exact on average, with no random numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from tightfit.backends.pytorch.sharding import local_shard
from tightfit.backends.pytorch.techniques.optimizer.compiled_update import (
    COMPILED_VALUES,
    FRACTIONS,
    STRIDE,
    Update,
    any_number_of_shapes,
    scalars,
)
from tightfit.errors import ModelError
from tightfit.techniques.precision import Rounding

CHUNK = 1 << 24
"""Values updated at once: bounds the temporaries at about 256 MiB, whatever the model. Fewer would leave a GPU waiting
for launches."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One parameter and its states, or some rows of them; `compensation` is None unless Kahan's."""

    step: int
    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    variance: Tensor
    compensation: Tensor | None = None


class AnyPrecisionAdamW(Optimizer):
    """AdamW with momentum and variance in formats of choice; see the module's text for the formula.

    momentum_dtype, variance_dtype: bf16, fp32 or the weights' own. rounding: how bf16 weights take an update; `kahan`
    keeps one more bf16 tensor a weight. update: the compiled one; None updates op by op. Weights may be bf16, fp32 or
    fp64, mixed. Raises ModelError for another dtype.
    """

    _compiled: Update | None = None  # of one that was copied or read back

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01, *, momentum_dtype: torch.dtype = torch.bfloat16,
        variance_dtype: torch.dtype = torch.bfloat16, rounding: Rounding = "nearest",
        update: Update | None = None,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rounding": rounding}
        super().__init__(params, defaults)
        self._momentum_dtype = momentum_dtype
        self._variance_dtype = variance_dtype
        self._compiled = update
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype not in (torch.bfloat16, torch.float32, torch.float64):
                    dtype = str(parameter.dtype).removeprefix("torch.")
                    raise ModelError(f"optimizer: the parameter of shape {tuple(parameter.shape)} is {dtype}, and only "
                                     "bf16, fp32 and fp64 are updated here; cast it to one of these")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; gradients are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            learned = [self._piece(p, group["rounding"]) for p in group["params"] if p.grad is not None]
            if self._compiled is not None:
                _update_compiled(self._compiled, filter(_pays, learned), group)
                learned = [piece for piece in learned if not _pays(piece)]
            by_dtype: dict[torch.dtype, list[_Piece]] = defaultdict(list)
            for piece in learned:
                by_dtype[piece.weight.dtype].extend(_parts(piece))
            for pieces in by_dtype.values():
                for chunk in _chunks(pieces):
                    _update(chunk, group)
        return loss

    def _piece(self, parameter: Tensor, rounding: Rounding) -> _Piece:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(parameter, dtype=self._momentum_dtype)
            state["variance"] = torch.zeros_like(parameter, dtype=self._variance_dtype)
            if rounding == "kahan" and parameter.dtype is torch.bfloat16:
                state["compensation"] = torch.zeros_like(parameter)
        state["step"] += 1
        whole = [parameter, cast(Tensor, parameter.grad), state["momentum"], state["variance"]]
        if "compensation" in state:
            whole.append(state["compensation"])
        return _Piece(state["step"], *map(local_shard, whole))  # of weights of which other processes have parts


def _pays(piece: _Piece) -> bool:
    """Whether a compiled kernel of its own pays for a parameter. Its scalars are fp32."""
    return piece.weight.numel() >= COMPILED_VALUES and piece.weight.dtype is not torch.float64


def _update_compiled(update: Update, pieces: Iterable[_Piece], group: dict[str, Any]) -> None:
    """One step, a kernel for each parameter."""
    numbers: dict[int, tuple[Tensor, ...]] = {}
    with any_number_of_shapes():
        for piece in pieces:
            step = piece.step
            if step not in numbers:
                numbers[step] = scalars(step, float(group["lr"]), group["betas"], group["weight_decay"])
            update(
                piece.weight.detach(), piece.gradient, piece.momentum, piece.variance, piece.compensation,
                *numbers[step], betas=group["betas"], eps=group["eps"], rounding=group["rounding"],
            )  # fmt: skip


def _parts(piece: _Piece) -> Iterator[_Piece]:
    """A piece in rows of at most `CHUNK` values."""
    whole = [t for t in (piece.weight, piece.gradient, piece.momentum, piece.variance, piece.compensation)
             if t is not None]
    if piece.weight.numel() <= CHUNK:
        yield piece
        return
    rows = max(1, CHUNK * piece.weight.shape[0] // piece.weight.numel())
    for parts in zip(*(tensor.split(rows) for tensor in whole), strict=True):
        yield _Piece(piece.step, *parts)


def _chunks(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Runs of at least one piece and about `CHUNK` values at most. A piece of a quarter of that is one by itself, so
    that none reaches from one of a model's alike blocks into the next."""
    run: list[_Piece] = []
    values = 0
    for piece in pieces:
        alone = piece.weight.numel() >= CHUNK // 4
        if run and (alone or values + piece.weight.numel() > CHUNK):
            yield run
            run, values = [], 0
        run.append(piece)
        values += piece.weight.numel()
        if alone:
            yield run
            run, values = [], 0
    if run:
        yield run


def _update(pieces: list[_Piece], group: dict[str, Any]) -> None:
    """One step for pieces whose weights have one dtype."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    weights, steps = [p.weight for p in pieces], [p.step for p in pieces]
    full = torch.promote_types(weights[0].dtype, torch.float32)
    gradients = _widen([p.gradient for p in pieces], full)
    momenta = _widen(kept_momenta := [p.momentum for p in pieces], full)
    variances = _widen(kept_variances := [p.variance for p in pieces], full)

    torch._foreach_lerp_(momenta, gradients, 1 - beta1)
    torch._foreach_mul_(variances, beta2)
    torch._foreach_addcmul_(variances, gradients, gradients, 1 - beta2)
    del gradients
    denominators = torch._foreach_sqrt(variances)
    torch._foreach_div_(denominators, [math.sqrt(1 - beta2**step) for step in steps])
    torch._foreach_add_(denominators, group["eps"])
    keep(kept_variances, variances, steps)
    del variances

    rates = [-lr / (1 - beta1**step) for step in steps]
    decay = lr * group["weight_decay"]
    wide = _widen(weights, full)
    if pieces[0].compensation is not None:
        updates = _widen(compensations := [cast(Tensor, p.compensation) for p in pieces], full)
        torch._foreach_add_(updates, wide, alpha=-decay)
        torch._foreach_addcdiv_(updates, momenta, denominators, rates)
        del denominators
        add_to_nearest(weights, wide, updates)
        keep(compensations, updates, steps)
    else:
        torch._foreach_mul_(wide, 1 - decay)
        torch._foreach_addcdiv_(wide, momenta, denominators, rates)
        if wide is not weights:
            if group["rounding"] == "stochastic":
                round_at_random(wide)
            torch._foreach_copy_(weights, wide)
    keep(kept_momenta, momenta, steps)


def _widen(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies in `dtype`; the very same list where that is what they have."""
    if all(tensor.dtype is dtype for tensor in tensors):
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def add_to_nearest(weights: list[Tensor], wide: list[Tensor], updates: list[Tensor]) -> None:
    """Add `updates` to bf16 weights, whose copies `wide` are, and leave in `updates` what rounding lost."""
    sums = torch._foreach_add(wide, updates)
    torch._foreach_copy_(weights, sums)
    torch._foreach_copy_(sums, weights)
    torch._foreach_sub_(wide, sums)
    torch._foreach_add_(updates, wide)


def round_at_random(values: list[Tensor]) -> None:
    """Round fp32 values up or down to bf16 ones at random, in proportion, in place."""
    for value in values:
        noise = torch.randint_like(value, FRACTIONS, dtype=torch.int32)
        noise.masked_fill_(value.isnan(), 0)  # a GPU's NaN has all its bits set: any more would make it a zero
        _cut(value.view(torch.int32).add_(noise))
        del noise  # before the next one is made


def keep(kept: list[Tensor], values: list[Tensor], steps: list[int]) -> None:
    """Write states to their own format, bf16 ones rounded by the walking offset. Uses up `values`."""
    if kept is values:
        return
    if kept[0].dtype is torch.bfloat16:
        values = [value.float() for value in values]
        bits = [value.view(torch.int32) for value in values]
        torch._foreach_add_(bits, [step * STRIDE % FRACTIONS for step in steps])
        for each in bits:
            _cut(each)
    torch._foreach_copy_(kept, values)


def _cut(bits: Tensor) -> None:
    """Clear the bits of fp32 values that bf16 ones lack, in place: rounding towards zero."""
    bits.bitwise_and_(-FRACTIONS)

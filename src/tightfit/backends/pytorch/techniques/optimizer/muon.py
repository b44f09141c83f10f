"""Muon for the matrices of a model's blocks and another optimizer for all other parameters, as one optimizer.

A matrix takes the step of torch.optim.Muon: its momentum made orthogonal, times the learning rate and 0.2 times the
root of its longer side, which gives it the root mean square of AdamW's step. Each of the experts stacked in one
parameter, which torch's refuses, takes the same in batched products. A bf16 matrix that rounds as `anyprecision` has it
takes its step from zeros, which is then added to the weight in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.experts.active_parameters import experts_of
from tightfit.backends.pytorch.techniques.optimizer.anyprecision import CHUNK, add_to_nearest, keep, round_at_random
from tightfit.backends.pytorch.techniques.optimizer.apply import adamw, by_decay, embedding_parameters
from tightfit.techniques.muon import Muon
from tightfit.techniques.optimizer import AdamW

COEFFICIENTS, ITERATIONS, SMALLEST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7
"""Those of torch.optim.Muon's Newton-Schulz iterations, which are Jordan's."""


def muon(technique: Muon, build: Build) -> Build:
    """Muon for the matrices of the blocks, and for the rest AdamW as its own technique has it."""
    beside = adamw(AdamW(betas=technique.betas, weight_decay=technique.weight_decay), build)
    knobs = {"lr": build.recipe.learning_rate, "weight_decay": technique.weight_decay, "momentum": technique.momentum,
             "rounding": build.recipe.weight_rounding or "nearest"}  # fmt: skip

    def factory(model: nn.Module) -> Optimizer:
        assert beside.optimizer_factory is not None
        return MuonWithRest({"params": matrices_of(model, build.blocks), **knobs}, beside.optimizer_factory(model))

    return replace(build, optimizer_factory=factory)


def matrices_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The trainable matrices, and stacks of experts' matrices, of a model's blocks, or of all of one without blocks.
    Biases, what a normalization layer owns, tables of embeddings and complex matrices are none."""
    inside = {parameter for part in blocks or (model,) for parameter in part.parameters()}
    inside.difference_update(embedding_parameters(model))
    stacks = {p for experts in experts_of(model) for p in experts.parameters(recurse=False) if p.ndim == 3}
    return [p for p in by_decay(model)[0] if p in inside and (p.ndim == 2 or p in stacks) and not p.is_complex()]


class MuonWithRest(Optimizer):
    """Muon for matrices, beside another optimizer, which shares its groups and states.

    matrices: a group of matrices, and of stacks of them, with lr, weight_decay, momentum and rounding: how bf16 ones
    take an update. rest: an optimizer of all parameters, which keeps the others.
    """

    def __init__(self, matrices: dict[str, Any], rest: Optimizer) -> None:
        taken = {*matrices["params"]}
        others = [{**group, "params": [p for p in group["params"] if p not in taken]} for group in rest.param_groups]
        groups = [group for group in ({**matrices, "orthogonal": True}, *others) if group["params"]]
        super().__init__(groups, {**rest.defaults, "orthogonal": False})
        self._rest = rest

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rest": self._rest}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; gradients are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            learned = [p for p in group["params"] if p.grad is not None] if group["orthogonal"] else []
            for parameter in learned:
                self._update(parameter, group)
        self._rest.param_groups = [group for group in self.param_groups if not group["orthogonal"]]
        self._rest.state = self.state
        self._rest.step()
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        rounding = group["rounding"] if parameter.dtype is torch.bfloat16 else "nearest"
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
            if rounding == "kahan":
                state["compensation"] = torch.zeros_like(parameter)
                state["step"] = 0
        stacked = [parameter.detach(), parameter.grad, state["momentum_buffer"]]
        if rounding == "kahan":
            stacked.append(state["compensation"])
            state["step"] += 1
        several = max(1, CHUNK * len(parameter) // parameter.numel()) if parameter.ndim == 3 else len(parameter)
        for weight, gradient, momentum, *compensation in zip(*(t.split(several) for t in stacked), strict=True):
            if rounding == "nearest":
                _move(weight, gradient, momentum, group, group["weight_decay"])
                continue
            change = torch.zeros_like(weight)
            _move(change, gradient, momentum, group, 0.0)
            decay, wide = group["lr"] * group["weight_decay"], weight.float()
            if rounding == "kahan":
                exact = compensation[0].float().add_(change).add_(wide, alpha=-decay)
                add_to_nearest([weight], [wide], [exact])
                keep(compensation, [exact], [state["step"]])
            else:
                round_at_random([wide.mul_(1 - decay).add_(change)])
                weight.copy_(wide)


def _move(matrix: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any], weight_decay: float) -> None:
    """One step of torch's Muon, of this matrix or stack alone, in place."""
    if matrix.ndim == 3:
        _move_stack(matrix, gradient, momentum, group, weight_decay)
        return
    matrix.grad = gradient
    muon = torch.optim.Muon([matrix], lr=group["lr"], weight_decay=weight_decay, momentum=group["momentum"],
                            adjust_lr_fn="match_rms_adamw")  # fmt: skip
    muon.state[matrix]["momentum_buffer"] = momentum
    muon.step()
    matrix.grad = None


def _move_stack(stack: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any], weight_decay: float) -> None:
    """The step that torch's Muon takes for a matrix, for each of a stack, (matrices, rows, columns), in place."""
    momentum.lerp_(gradient, 1 - group["momentum"])
    x = gradient.lerp(momentum, group["momentum"]).bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    rate = 0.2 * max(stack.shape[1:]) ** 0.5 * group["lr"]
    stack.mul_(1 - group["lr"] * weight_decay).add_(x.mT if tall else x, alpha=-rate)

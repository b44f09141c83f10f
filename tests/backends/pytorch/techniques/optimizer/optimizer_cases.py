"""Every optimizer technique at every setting worth trying, over fp32 weights and each way it rounds bf16 ones."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.plain import CPU
from tightfit.backends.pytorch.apply import APPLY
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.models import cast_weights
from tightfit.backends.pytorch.techniques.optimizer import state
from tightfit.backends.pytorch.techniques.precision import weight_dtype
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import get_task
from tightfit.techniques import SLOTS
from tightfit.techniques.optimizer import Optimizer as Declared
from tightfit.techniques.precision import Bf16Pure, Fp32, Precision

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")

RATES = {"adafactor": 0.05, "sgd": 0.03, "lion": 1e-3}
"""Learning rates that suit the tiny regression, where 3e-3 does not."""


@dataclass(frozen=True)
class Case:
    technique: Declared
    precision: Precision
    rate: float | None = None

    def __str__(self) -> str:
        knob = getattr(self.technique, "implementation", "")
        return "-".join(filter(None, (self.technique.name, knob, getattr(self.precision, "rounding", ""))))

    @property
    def learning_rate(self) -> float:
        return RATES.get(self.technique.name, 3e-3) if self.rate is None else self.rate

    def build(self, model: nn.Module) -> Build:
        """Precision and optimizer applied, and nothing else."""
        recipe = Recipe.from_dict(
            {"precision": self.precision, "optimizer": self.technique, "learning_rate": self.learning_rate}
        )
        build = Build(
            recipe=recipe, device=CPU, torch_device=torch.device("cpu"), task=get_task("causal-lm"), facts=ModelFacts(),
            model=cast_weights(model, weight_dtype(self.precision)), stacks=(),
        )  # fmt: skip
        for technique in (self.precision, self.technique):
            build = APPLY[type(technique)](technique, build)
        return build

    def optimizer(self, model: nn.Module) -> Optimizer:
        factory = self.build(model).optimizer_factory
        assert factory is not None
        return factory(model)


def _cases() -> list[Case]:
    variants = cast(tuple[type[Declared], ...], SLOTS["optimizer"])
    return [Case(rung, Fp32()) for variant in variants for rung in variant.representative_settings()] + [
        Case(variant(), Bf16Pure(rounding=rounding)) for variant in variants for rounding in variant.bf16_roundings
    ]


CASES = _cases()


class Tiny(nn.Module):
    """A regression on token ids: matrices large enough to be quantized, biases, a normalization, an embedding."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.hidden = nn.Linear(width, width * 2)
        self.norm = nn.LayerNorm(width * 2)
        self.out = nn.Linear(width * 2, 8)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.out(self.norm(torch.tanh(self.hidden(self.embedding(ids)))))
        return hidden


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def train(model: Tiny, optimizer: Optimizer, steps: range) -> list[float]:
    """Losses of these steps; everything random depends on the step's number alone."""
    teacher = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for step in steps:
        torch.manual_seed(step)
        ids = torch.randint(64, (32,))
        loss = (model(ids).float() - teacher[ids]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def load_state(optimizer: Optimizer, model: nn.Module, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Give a new optimizer a state, made for all its parameters at once."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state.load_state(optimizer, model, tensors, meta, lambda: state.make_states(optimizer, parameters))

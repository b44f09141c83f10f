"""torch's and torchao's optimizers with a recipe's settings, for loops that make their own."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from tightfit.backends.pytorch.optimizer import ADAFACTOR_EPS, IMPLEMENTATIONS, parameter_groups
from tightfit.errors import MissingLibrary, Refused
from tightfit.recipe import Recipe
from tightfit.techniques.optimizer import Adafactor, AdamW, AdamW4bit, AdamW8bit, Sgd


def make_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """The recipe's optimizer over the model's parameters, those that decay apart from those that do not.

    Raises Refused where neither torch nor torchao has it.
    """
    technique, rate = recipe.optimizer, recipe.learning_rate
    if reason := rounding_refused(recipe, "torch's"):
        raise Refused(reason)
    assert recipe.precision != "auto"
    match technique:
        case AdamW():
            return torch.optim.AdamW(
                parameter_groups(model, technique.weight_decay), lr=rate, betas=technique.betas, eps=technique.eps,
                **IMPLEMENTATIONS[technique.implementation],
            )
        case Sgd():
            groups = parameter_groups(model, technique.weight_decay)
            return torch.optim.SGD(groups, lr=rate, momentum=technique.momentum)
        case Adafactor():
            groups = parameter_groups(model, technique.weight_decay)
            return torch.optim.Adafactor(groups, lr=rate, eps=ADAFACTOR_EPS)
        case AdamW8bit() | AdamW4bit():
            return _quantized(technique, recipe, model, recipe.precision.weight_rounding == "stochastic")
    name = getattr(technique, "name", technique)
    raise Refused(f"optimizer: neither torch nor torchao has {name}; write adamw, sgd, adafactor, adamw-8bit or "
                  "adamw-4bit")


def rounding_refused(recipe: Recipe, whose: str) -> str | None:
    """Why none of somebody's optimizers rounds 16-bit weights as the recipe says; None where one does."""
    assert recipe.precision != "auto"
    rounding = recipe.precision.weight_rounding
    able = ("nearest", "stochastic") if isinstance(recipe.optimizer, AdamW8bit | AdamW4bit) else ("nearest",)
    if rounding is None or rounding in able:
        return None
    return (f"precision.rounding: {rounding!r} is in none of {whose} optimizers; write precision.rounding="
            f"{' or '.join(able)}")


def _quantized(technique: AdamW8bit | AdamW4bit, recipe: Recipe, model: nn.Module, stochastic: bool) -> Optimizer:
    try:
        from torchao import optim
    except ImportError as error:
        raise MissingLibrary("torchao", f"optimizer {technique.name}", "torchao") from error
    make = optim.AdamW8bit if isinstance(technique, AdamW8bit) else optim.AdamW4bit
    made: Optimizer = make(
        parameter_groups(model, technique.weight_decay), lr=recipe.learning_rate, betas=technique.betas,
        block_size=technique.block_size, bf16_stochastic_round=stochastic,
    )  # fmt: skip
    return made

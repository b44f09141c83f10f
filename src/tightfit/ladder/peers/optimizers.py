"""torch's and torchao's optimizers with a recipe's settings, for loops that make their own."""

from __future__ import annotations

from torch import nn, optim
from torch.optim import Optimizer

from tightfit.backends.pytorch.techniques.optimizer.apply import ADAFACTOR_EPS, IMPLEMENTATIONS, parameter_groups
from tightfit.errors import MissingLibrary, Refused
from tightfit.recipe import Recipe
from tightfit.techniques.optimizer import Adafactor, AdamW, AdamW4bit, AdamW8bit, Sgd


def make_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """The recipe's optimizer over the model's parameters, those that decay apart from those that do not.

    Raises Refused where neither torch nor torchao has it.
    """
    technique, rate, precision = recipe.optimizer, recipe.learning_rate, recipe.precision
    if reason := rounding_refused(recipe, "torch's"):
        raise Refused(reason)
    assert technique != "auto"
    assert precision != "auto"
    groups = parameter_groups(model, getattr(technique, "weight_decay", 0.0))
    match technique:
        case AdamW():
            return optim.AdamW(groups, lr=rate, betas=technique.betas, eps=technique.eps,
                               **IMPLEMENTATIONS[technique.implementation])
        case Sgd():
            return optim.SGD(groups, lr=rate, momentum=technique.momentum)
        case Adafactor():
            return optim.Adafactor(groups, lr=rate, eps=ADAFACTOR_EPS)
        case AdamW8bit() | AdamW4bit():
            try:
                from torchao import optim as quantized
            except ImportError as error:
                raise MissingLibrary("torchao", f"optimizer {technique.name}", "torchao") from error
            make = quantized.AdamW8bit if isinstance(technique, AdamW8bit) else quantized.AdamW4bit
            made: Optimizer = make(groups, lr=rate, betas=technique.betas, block_size=technique.block_size,
                                   bf16_stochastic_round=precision.weight_rounding == "stochastic")
            return made
    raise Refused(f"optimizer: neither torch nor torchao has {technique.name}; write adamw, sgd, adafactor, "
                  "adamw-8bit or adamw-4bit")


def rounding_refused(recipe: Recipe, whose: str) -> str | None:
    """Why none of somebody's optimizers rounds 16-bit weights as the recipe says; None where one does."""
    assert recipe.precision != "auto"
    rounding = recipe.precision.weight_rounding
    able = ("nearest", "stochastic") if isinstance(recipe.optimizer, AdamW8bit | AdamW4bit) else ("nearest",)
    if rounding is None or rounding in able:
        return None
    return (f"precision.rounding: {rounding!r} is in none of {whose} optimizers; write precision.rounding="
            f"{' or '.join(able)}")

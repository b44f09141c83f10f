"""What a recipe can change to use less memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tightfit.devices import Device
from tightfit.recipe import Recipe
from tightfit.techniques.optimizer import AdamW8bit
from tightfit.techniques.precision import half_precision


@dataclass(frozen=True)
class Saving:
    """One field written differently. why: what that spares or costs, in a few words."""

    field: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.field}={self.value} ({self.why})"


def savings(recipe: Recipe, device: Device) -> Iterator[Saving]:
    """Changes of what a recipe pins that use less memory and can serve on the device, the least costly first: what
    keeps the numbers, then what changes them."""
    for saving in _savings(recipe, device):
        changed = recipe.override(**{saving.field: saving.value})
        if changed != recipe and not changed.refusals(device):
            yield saving


def _savings(recipe: Recipe, device: Device) -> Iterator[Saving]:
    micro, precision, optimizer = recipe.micro_batch_size, recipe.precision, recipe.optimizer
    if micro != "auto" and micro > 1:
        yield Saving("micro_batch_size", micro // 2, "the same global batch, more accumulation")
    if recipe.attention != "auto" and recipe.attention.name == "eager":
        yield Saving("attention", "sdpa", "no matrix of scores")
    if recipe.checkpointing != "auto" and recipe.checkpointing.name != "every-block":
        yield Saving("checkpointing", "selective", "cheap results are computed again")
        yield Saving("checkpointing", "every-block", "activations are computed again, 20 to 30 % slower")
    if precision != "auto" and precision.name == "fp32":
        yield Saving("precision", half_precision(device).name, "activations halve")
    rounding = None if precision == "auto" else precision.weight_rounding
    few = AdamW8bit.state_bytes
    if optimizer != "auto" and optimizer.bytes_beside(rounding) > few:
        states = f"{few:g} bytes of states a parameter instead of {optimizer.bytes_beside(rounding):g}"
        yield Saving("optimizer", AdamW8bit.name, f"{states}; changes numerics")
    if precision != "auto" and rounding is None:
        yield Saving("precision", "bf16-pure", "2 bytes a weight and a gradient; changes numerics")

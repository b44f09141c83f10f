"""What to change in a recipe that ran out of memory, or out of numbers."""

from __future__ import annotations

from tightfit.devices import Device
from tightfit.planning.savings import savings
from tightfit.recipe import Recipe

MOST = 3
"""As many ways out are named at once."""


def smaller(recipe: Recipe, device: Device) -> list[str]:
    """Recipe changes that use less memory and can serve on the device, the least costly first."""
    advice = [str(saving) for saving in savings(recipe, device)][:MOST]
    return advice or [f"seq_len={max(recipe.seq_len // 2, 1)}, or a smaller model"]


def steadier(recipe: Recipe) -> list[str]:
    """Recipe changes that keep numbers finite."""
    changes = [
        f"learning_rate={recipe.learning_rate / 3:.1g}",
        f"warmup_steps={max(2 * recipe.warmup_steps, 100)}",
    ]
    if recipe.max_grad_norm == 0.0:
        changes.append("max_grad_norm=1.0")
    if recipe.precision != "auto" and recipe.precision.name != "fp32":
        changes.append("precision=fp32")
    return changes

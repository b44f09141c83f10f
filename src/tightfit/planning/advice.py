"""What to change in a recipe that ran out of memory, or out of numbers."""

from __future__ import annotations

from typing import Any

from tightfit.devices import Device
from tightfit.recipe import Recipe


def smaller(recipe: Recipe, device: Device) -> list[str]:
    """Recipe changes that use less memory and can serve on the device, the least costly first."""
    micro = recipe.micro_batch_size
    changes: list[tuple[str, Any, str]] = []
    if micro != "auto" and micro > 1:
        changes.append(("micro_batch_size", micro // 2, "the same global batch, more accumulation"))
    changes += [
        ("attention", "sdpa", "no matrix of scores"),
        ("precision", "bf16", "half the activations"),
        ("precision", "fp16", "half the activations"),
        ("checkpointing", "every-block", "recompute activations, 20 to 30 % slower"),
        ("optimizer", "adamw-8bit", "2 bytes of states a parameter instead of 8"),
    ]
    advice = [f"{field}={value} ({why})" for field, value, why in changes if _helps(recipe, device, field, value)]
    return advice or [f"seq_len={max(recipe.seq_len // 2, 1)}, or a smaller model"]


def _helps(recipe: Recipe, device: Device, field: str, value: Any) -> bool:
    """Whether the change is one, saves memory, and is not refused."""
    now = getattr(recipe, field)
    if field == "attention" and now != "auto" and now.name != "eager":
        return False
    if field == "precision" and now != "auto" and now.name != "fp32":
        return False
    if field == "optimizer" and now != "auto" and now.state_bytes <= 2:
        return False
    changed = recipe.override(**{field: value})
    return getattr(changed, field) != now and not changed.refusals(device)


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

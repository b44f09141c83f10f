"""Recipe changes that use less memory, and ways out for a run that ran out of memory or out of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tightfit.devices import Device
from tightfit.errors import OutOfMemory
from tightfit.recipe import Recipe
from tightfit.techniques import SLOTS

MOST_NAMED = 3
"""Number of ways out that are named at once."""


@dataclass(frozen=True)
class Saving:
    """One field written differently, for `Recipe.override`. text: as a person writes it. why: what that saves or
    costs, in a few words. changes_numerics: whether results change."""

    field: str
    value: Any
    text: str
    why: str
    changes_numerics: bool = False

    def __str__(self) -> str:
        return f"{self.text} ({self.why})"


def savings(recipe: Recipe, device: Device) -> Iterator[Saving]:
    """Changes of what a recipe pins that use less memory and can serve on the device, the least costly first: what
    keeps the numbers, then what changes them."""
    micro = recipe.micro_batch_size
    if micro != "auto" and micro > 1:
        yield Saving("micro_batch_size", micro // 2, f"micro_batch_size={micro // 2}",
                     "the same global batch, more accumulation")
    pinned = [setting for slot in SLOTS if (setting := getattr(recipe, slot)) != "auto"]
    for setting in pinned:
        for knobs, why in setting.thriftier_knobs:
            changed = recipe.override(**{setting.slot: replace(setting, **knobs)})
            text = " ".join(f"{setting.slot}.{knob}={str(value).lower()}" for knob, value in knobs.items())
            if not changed.refusals(device):
                yield Saving(setting.slot, changed.to_dict()[setting.slot], text, why)
    offered = [setting for chosen in pinned for kind in SLOTS[chosen.slot]
               for setting in kind.search_settings(recipe, device)[:1] if setting.saving(recipe)]
    for setting in sorted(offered, key=lambda s: (s.numerics_change, s.changes_states, s.slowdown(device))):
        changed = recipe.override(**{setting.slot: setting.name})
        if changed != recipe and not changed.refusals(device):
            changes = setting.numerics_change > 0
            yield Saving(setting.slot, setting.name, f"{setting.slot}={setting.name}",
                         setting.saving(recipe) + "; changes numerics" * changes, changes)


def memory_suggestions(recipe: Recipe, device: Device) -> list[str]:
    """Recipe changes that use less memory and can serve on the device, the least costly first."""
    advice = [str(saving) for saving in savings(recipe, device)][:MOST_NAMED]
    return advice or [f"seq_len={max(recipe.seq_len // 2, 1)}, or a smaller model"]


def with_suggestions(error: OutOfMemory, recipe: Recipe, device: Device) -> OutOfMemory:
    """An error that ends a run, with what may help."""
    return OutOfMemory(f"{error}. Try: {'; or '.join(memory_suggestions(recipe, device))}")


def stability_suggestions(recipe: Recipe) -> list[str]:
    """Recipe changes that keep numbers finite."""
    lower = recipe.learning_rate / 3 if recipe.learning_rate <= 1 else 1e-3  # beyond 1 it is a slip of the hand
    changes = [
        f"learning_rate={lower:.1g}",
        f"warmup_steps={max(2 * recipe.warmup, 100)}",
    ]
    if recipe.max_grad_norm == 0.0:
        changes.append("max_grad_norm=1.0")
    if recipe.is_half:
        held = recipe.frozen_base.bytes_held == 2  # which fp32 does not go with
        changes.append("precision=fp32" + " base=as-is" * held)
    return changes


"""Simple, documented choices for a recipe's `auto` fields.

| field | choice |
|---|---|
| micro_batch_size | largest power of two of at most 16,384 tokens (CUDA) or 4,096 (CPU), at most the global batch |
| a technique's slot | the setting that one of its variants calls usual; else the first variant |
| backend.layers | unrolled |
| offload: shares of `host` | 1 |
| loading.workers | CUDA: 2; CPU: 0 |
| expandable_segments | false |
"""

from __future__ import annotations

from dataclasses import replace

from tightfit.devices import Device
from tightfit.recipe import Recipe
from tightfit.techniques import SLOTS, VARIANTS, default_for_slot, is_searched

MICRO_BATCH_TOKENS = {"cuda": 16_384, "cpu": 4_096}
WORKERS = {"cuda": 2, "cpu": 0}


def resolve(recipe: Recipe, device: Device) -> Recipe:
    """The recipe with every `auto` replaced; what a person pinned stays."""
    micro = default_micro_batch(recipe, device) if recipe.micro_batch_size == "auto" else recipe.micro_batch_size
    open_slots = [slot for slot in SLOTS if getattr(recipe, slot) == "auto"]
    for slot in sorted(open_slots, key=is_searched, reverse=True):  # what follows others comes last
        recipe = recipe.model_copy(update={slot: default_for_slot(recipe, device, slot)})
    return fill_rest(recipe.model_copy(update={"micro_batch_size": micro}), device)


def other_than_usual(recipe: Recipe, device: Device) -> list[str]:
    """The slots of a recipe that say another thing than `auto`, and than what that stands for on a device."""
    fields = ["micro_batch_size", *(slot for slot, variants in SLOTS.items() if variants[0].may_be_auto)]
    usual = resolve(recipe.model_copy(update=dict.fromkeys(fields, "auto")), device)
    return [slot for slot in fields[1:] if getattr(recipe, slot) not in ("auto", getattr(usual, slot))]


def fill_rest(recipe: Recipe, device: Device) -> Recipe:
    """The recipe with what no search decides replaced."""
    changes: dict[str, object] = {}
    for slot in VARIANTS:
        if (value := getattr(recipe, slot)) != "auto" and (resolved := value.resolved()) != value:
            changes[slot] = resolved
    if recipe.loading.workers == "auto":
        changes["loading"] = replace(recipe.loading, workers=WORKERS[device.kind])
    if recipe.expandable_segments == "auto":
        changes["expandable_segments"] = False
    return recipe.model_copy(update=changes) if changes else recipe


def default_micro_batch(recipe: Recipe, device: Device) -> int:
    """The micro-batch where nothing is searched."""
    fits = max(MICRO_BATCH_TOKENS[device.kind] // recipe.seq_len, 1)
    return min(1 << (fits.bit_length() - 1), recipe.batch_size)

"""Dimensions that do not fill the tiles of a GPU's tensor cores, and what padding them gains.

The multiples are those of NVIDIA's Matrix Multiplication Background User's Guide (2023), "Tensor Core Requirements":
16 bytes of a row, and on the A100 128 bytes. A warning is given below the first; below the second only where a field
of the recipe can pad, for it is a matter of a few percent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.devices import Device
from tightfit.models import read_config
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.text import percent

NAMES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "intermediate_size": ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "encoder_ffn_dim"),
    "head_dim": ("head_dim", "d_kv"),
}
"""A transformer's dimensions, and what configurations call them."""

WORTH_SAYING = 0.001
"""The predicted share of a step's time below which padding is not worth a word."""

Gain = Callable[[Recipe], float | None]
"""The share of a step's time that a changed recipe saves, predicted; None where it cannot be."""


@dataclass(frozen=True, kw_only=True)
class Misalignment:
    """A dimension that is not a multiple of what the device's tensor cores want.

    field: what it is called, such as `vocab_size`.
    value, multiple, padded: what it is, what it should be a multiple of, the next such size.
    gain: predicted share of a step's time that padding saves, 0 to 1; None where it was not predicted.
    sentence: the finding, and what to write where a recipe field pads it.
    """

    field: str
    value: int
    multiple: int
    padded: int
    gain: float | None
    sentence: str


def dimensions(recipe: Recipe) -> dict[str, int]:
    """The dimensions that matrix products of the recipe's model have, by NAMES, as far as its configuration states
    them. Raises ModelError as `read_config` does."""
    config = read_config(recipe)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found: dict[str, int] = {}
    for field, names in NAMES.items():
        values = [value for name in names if isinstance(value := getattr(text, name, None), int) and value > 0]
        if values:
            found[field] = values[0]
    heads = next((n for name in ("num_attention_heads", "n_head", "num_heads", "n_heads")
                  if isinstance(n := getattr(text, name, None), int) and n > 0), 0)
    if heads and "hidden_size" in found and "head_dim" not in found:
        found["head_dim"] = found["hidden_size"] // heads
    if TASKS[recipe.task].reads == "tokens":
        found["seq_len"] = recipe.seq_len
        if recipe.pad_vocab_to and "vocab_size" in found:
            found["vocab_size"] = _padded(found["vocab_size"], recipe.pad_vocab_to)
        if recipe.pad_sequence_to:
            found["seq_len"] = _padded(recipe.seq_len, recipe.pad_sequence_to)
    else:
        found.pop("vocab_size", None)
    return found


def wanted_multiples(device: Device, element_bytes: int) -> tuple[int, int]:
    """What a dimension should at least, and best, be a multiple of; (1, 1) without tensor cores."""
    if not device.at_least(7) or (element_bytes == 4 and not device.at_least(8)):
        return 1, 1
    least = 16 // element_bytes
    return least, 128 // element_bytes if device.wants_wide_rows else least


def misaligned(
    recipe: Recipe, device: Device, dims: Mapping[str, int], gain: Gain | None = None
) -> tuple[Misalignment, ...]:
    """The dimensions that leave tensor cores idle, worst first; those that padding is predicted not to help are left
    out.

    recipe: resolved. dims: as `dimensions` gives them. gain: predicts what a padded recipe saves.
    """
    precision = recipe.precision
    assert precision != "auto", "resolve the recipe first"
    full = not precision.is_half
    if full and not precision.tf32:
        return ()
    least, best = wanted_multiples(device, 4 if full else 2)
    found = []
    for field, value in dims.items():
        if field == "vocab_size":
            change = _pads(recipe, "pad_vocab_to", best)
            multiple = best
        elif field == "seq_len":
            multiple, change = least, None
        else:
            multiple, change = least, None
        if value % multiple == 0:
            continue
        saved = gain(recipe.override(**change)) if gain is not None and change else None
        if saved is not None and saved < WORTH_SAYING:
            continue
        padded = _padded(value, multiple)
        found.append(Misalignment(
            field=field, value=value, multiple=multiple, padded=padded, gain=saved,
            sentence=_sentence(field, value, multiple, padded, change, saved),
        ))
    return tuple(sorted(found, key=lambda m: -(m.gain or 0.0)))


def _pads(recipe: Recipe, field: str, multiple: int) -> dict[str, Any] | None:
    return None if getattr(recipe, field) == multiple else {field: multiple}


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _sentence(
    field: str, value: int, multiple: int, padded: int, change: dict[str, Any] | None, gain: float | None
) -> str:
    text = f"{field} {value:,} is not a multiple of {multiple}, which tensor cores want"
    if change:
        written = " ".join(f"{name}={new}" for name, new in change.items())
        saves = "" if gain is None else f", which is predicted to save {percent(gain)} of a step"
        return f"{text}; write {written} ({padded:,}){saves}."
    if field == "seq_len":
        return f"{text}; write seq_len={padded if padded - value <= value % multiple else value - value % multiple}."
    return f"{text}; it is part of the model's shape: {padded:,} would be, in a model of your own."

"""Fields of a recipe as a person writes them."""

from __future__ import annotations

from typing import Any

from tightfit.recipe.yaml import technique_to_yaml
from tightfit.techniques import Technique


def value_text(value: Any) -> str:
    """A plain value as a person writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def field_text(field: str, value: Any) -> str:
    """A field as a person writes it: `checkpointing=every-nth checkpointing.n=3`."""
    if not isinstance(value, Technique):
        return f"{field}={value_text(value)}"
    plain = technique_to_yaml(value)
    if isinstance(plain, str):
        return f"{field}={plain}"
    knobs = (field_text(f"{field}.{knob}", setting) for knob, setting in plain.items() if knob != "name")
    return " ".join([f"{field}={value.name}", *knobs])

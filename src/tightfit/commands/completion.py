"""Words that a shell completes. Only a shell that asks for them loads what they come from."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

import typer


def complete_recipe(incomplete: str) -> list[str]:
    """Bundled recipes and models."""
    from tightfit.bundled import BUNDLED, bundled_recipes

    return [name for name in (*bundled_recipes(), *BUNDLED) if name.startswith(incomplete)]


def complete_gpu(incomplete: str) -> list[str]:
    """GPUs of the catalogue, also behind others and a comma."""
    from tightfit.devices import gpu_names

    before, comma, last = incomplete.rpartition(",")
    names = gpu_names() if comma else ["all", "cpu", *gpu_names()]
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def complete_override(context: typer.Context, incomplete: str) -> list[str]:
    """A recipe's fields as `field=`; one that is clear already with the values that it takes, or its default. Bash
    breaks words at `=`, and asks for the value alone."""
    from tightfit.recipe import Recipe

    before = [word for word in context.params.get("overrides") or [] if word != "="][-1:]
    if before and before[0] in Recipe.model_fields:
        return [value for value in _values(before[0]) if value.startswith(incomplete)]
    start, equals, _ = incomplete.partition("=")
    fields = [field for field in Recipe.model_fields if (field == start if equals else field.startswith(start))]
    words = [f"{field}=" for field in fields]
    if len(fields) == 1:
        words += [f"{fields[0]}={value}" for value in _values(fields[0])]
    return [word for word in words if word.startswith(incomplete)]


def _values(field: str) -> list[str]:
    """Names that a field takes; its default where it takes none."""
    from tightfit.recipe import Recipe
    from tightfit.techniques import VARIANTS

    if field in VARIANTS:
        auto = ["auto"] if VARIANTS[field][0].may_be_auto else []
        return [*auto, *(variant.name for variant in VARIANTS[field])]
    annotation = Recipe.model_fields[field].annotation
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if annotation is bool:
        return ["false", "true"]
    default = Recipe().to_dict()[field]
    return [str(default)] if isinstance(default, str | int | float) else []

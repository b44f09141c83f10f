"""Resuming a run with a recipe: which fields may differ from those that it began with."""

from __future__ import annotations

from typing import Any

from tightfit.errors import CheckpointError
from tightfit.recipe.schema import Recipe

ROUNDING = ("micro_batch_size", "attention", "loss", "checkpointing", "accumulation", "compile", "backend")
"""Fields of `MAY_CHANGE` that change a step's rounding, or the random numbers that dropout draws."""

MAY_CHANGE = frozenset({
    "max_steps", "logging_steps", "eval_steps", "eval_samples", "save_steps", "save_total_limit", "output_dir",
    "resume", "report_to", "profile_step", "sample_prompt", "cache_dir", "loading", "empty_cache_steps", "device",
    "allow_numerics", "inference", "hugging_face", *ROUNDING,
})  # fmt: skip
"""Fields that the mathematics of a step does not depend on: a run may go on with others."""


def continued(wanted: Recipe, saved: Recipe) -> tuple[Recipe, list[str]]:
    """`wanted` with what it leaves to `auto` taken from the run it continues, and which fields change its rounding.

    Raises CheckpointError listing every difference that the mathematics depends on.
    """
    wanted = wanted.model_copy(update={"backend": wanted.backend.continuing(saved.backend)})
    values, before = wanted.to_dict(), saved.to_dict()
    filled = {name: before[name] if value == "auto" else value for name, value in values.items()}
    lines = [
        line
        for name in filled
        if name not in MAY_CHANGE
        for line in _differences(name, before[name], filled[name])
    ]
    lines += _differences("backend", saved.backend.name, wanted.backend.name)
    if lines:
        raise CheckpointError(
            f"this run was started with another recipe ({'; '.join(lines)}); write what it had, or another output_dir"
        )
    return Recipe.from_dict(filled), [name for name in ROUNDING if filled[name] != before[name]]


def _differences(name: str, then: Any, now: Any) -> list[str]:
    """Each value that differs, by its dotted name."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*then, *now])
        return [line for key in keys for line in _differences(f"{name}.{key}", then.get(key), now.get(key))]
    return [] if then == now else [f"{name}: {then!r} then, {now!r} now"]

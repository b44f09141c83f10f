"""Resuming a run with a recipe: which fields may differ from those that it began with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightfit.errors import CheckpointError
from tightfit.recipe.schema import Recipe

ROUNDING = ("micro_batch_size", "attention", "loss", "checkpointing", "accumulation", "compile", "parallel", "backend",
            "deterministic")
"""Fields of `MAY_CHANGE` that change a step's rounding, or the random numbers that dropout draws."""

MAY_CHANGE = frozenset({
    "max_steps", "num_train_epochs", "logging_steps", "eval_steps", "eval_samples", "save_steps", "save_total_limit",
    "metric_for_best_model", "load_best_model_at_end", "early_stopping_patience", "early_stopping_threshold",
    "output_dir", "resume", "report_to", "profile_step", "sample_prompt", "cache_dir", "loading", "empty_cache_steps",
    "device", "recover", "allow_numerics", "inference", "hugging_face", "offload", "update", *ROUNDING,
})  # fmt: skip
"""Fields that the mathematics of a step does not depend on: a run may go on with others."""


def continued(wanted: Recipe, saved: Recipe, elsewhere: Path) -> tuple[Recipe, list[str]]:
    """`wanted` with what it leaves to `auto` taken from the run it continues, and which fields change its rounding.

    elsewhere: a folder that another run may have. Raises CheckpointError listing every difference that the mathematics
    depends on.
    """
    wanted = wanted.model_copy(update={"backend": wanted.backend.continuing(saved.backend)})
    values, before = wanted.to_dict(), saved.to_dict()
    filled = {name: _filled(value, before[name]) for name, value in values.items()}
    fixed = [{**{name: value for name, value in values.items() if name not in MAY_CHANGE}, "backend": backend.name}
             for values, backend in ((before, saved.backend), (filled, wanted.backend))]  # fmt: skip
    lines = [f"{name}: {then!r} then, {now!r} now" for name, then, now in differences(fixed[0], fixed[1])]
    if lines:
        raise CheckpointError(
            f"this run was started with another recipe ({'; '.join(lines)}); write what it had to go on with it, or "
            f"output_dir={elsewhere} for another run"
        )
    return Recipe.from_dict(filled), [name for name in ROUNDING if filled[name] != before[name]]


def _filled(wanted: Any, before: Any) -> Any:
    """A field's plain value with what it leaves to `auto`, itself or in a knob, taken from the run before."""
    if wanted == "auto":
        return before
    if isinstance(wanted, dict) and isinstance(before, dict) and wanted.get("name") == before.get("name"):
        return {name: _filled(value, before.get(name, value)) for name, value in wanted.items()}
    return wanted


def differences(then: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each value that differs between plain values, by its dotted name; None where one side has none."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*then, *now]):
            yield from differences(then.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif then != now:
        yield name, then, now

"""From complete TrainingArguments to a recipe's values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tightfit.errors import RecipeError, nearest
from tightfit.techniques import SLOTS
from tightfit.training_arguments.table import MAPPED

Arguments = Mapping[str, Any]
Values = dict[str, Any]

SAME = ("output_dir", "learning_rate", "lr_scheduler_type", "max_grad_norm", "seed")
"""Fields of a recipe that are called as their arguments, and mean the same."""

TECHNIQUES = ("precision", "checkpointing", "compile", "optimizer", "loading")
"""The slots that arguments fill: each variant knows its own arguments."""

STRATEGIES = {"eval_strategy": ("no", "steps", "epoch"), "save_strategy": ("no", "steps", "epoch", "best")}

NEUTRAL = {"use_reentrant": False, "preserve_rng_state": True, "offload": False}
"""gradient_checkpointing_kwargs that say what is so without them."""

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping",
         list: "a list"}  # fmt: skip


def recipe_values(a: Arguments, defaults: Arguments) -> tuple[Values, list[str]]:
    """A recipe's values for complete arguments, and reasons, each naming its argument, why some have none.

    defaults: the recipe's own, for max_steps, save_total_limit and logging_steps where the arguments have no number.
    """
    if reasons := _wrong_types(a):
        return {}, reasons
    values: Values = {}
    for part in PARTS:
        try:
            values |= part(a, defaults)
        except RecipeError as error:
            reasons.append(str(error))
    return values, reasons


def _plain_fields(a: Arguments, defaults: Arguments) -> Values:
    if a["report_to"] == ["all"]:
        raise RecipeError("report_to: 'all' is what happens to be installed; name the trackers, such as tensorboard")
    return {
        **{name: a[name] for name in SAME},
        "empty_cache_steps": a["torch_empty_cache_steps"],
        "report_to": [] if a["report_to"] == "none" else a["report_to"],
        "device": "cpu" if a["use_cpu"] else "auto",
        "save_total_limit": defaults["save_total_limit"] if a["save_total_limit"] is None else a["save_total_limit"],
    }


def _batch(a: Arguments, defaults: Arguments) -> Values:
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if a[name] < 1:
            raise RecipeError(f"{name}: {a[name]!r} should be at least 1")
    micro = a["per_device_train_batch_size"]
    return {"micro_batch_size": micro, "batch_size": micro * a["gradient_accumulation_steps"]}


def _steps(a: Arguments, defaults: Arguments) -> Values:
    total = a["max_steps"] if a["max_steps"] > 0 else defaults["max_steps"]

    def count(name: str) -> int:
        """A number of steps, written as one or as a share of all."""
        return int(a[name]) if a[name] >= 1 else math.ceil(total * a[name])

    def steps(name: str) -> int:
        value = a[name]
        if value <= 0:
            raise RecipeError(f"{name}: {value!r} should be more than 0")
        if value > 1 and value != int(value):
            raise RecipeError(f"{name}: {value!r} should be a whole number, or a share of all steps below 1")
        return count(name)

    for name, known in STRATEGIES.items():
        if a[name] not in known:
            raise RecipeError(f"{name}: {a[name]!r} is not known; {nearest(a[name], known)}")
    if a["warmup_steps"] < 0:
        raise RecipeError(f"warmup_steps: {a['warmup_steps']!r} should be 0 or more")
    return {
        "max_steps": total,
        "warmup_steps": count("warmup_steps"),
        "logging_steps": steps("logging_steps") if a["logging_strategy"] == "steps" else defaults["logging_steps"],
        "eval_steps": steps("eval_steps") if a["eval_strategy"] == "steps" else None,
        "save_steps": steps("save_steps") if a["save_strategy"] == "steps" else None,
    }


def _technique(slot: str, a: Arguments, defaults: Arguments) -> Values:
    """The variant of a slot that the arguments mean, with its knobs."""
    if slot in CHECKS:
        CHECKS[slot](a)
    for variant in SLOTS[slot]:
        knobs = variant.from_hf_arguments(a)
        if knobs is not None:
            return {slot: {"name": variant.name, **knobs}}
    known = [name for variant in SLOTS[slot] for name in getattr(variant, "hf_names", ())]
    raise RecipeError(f"optim: {a['optim']!r} has no counterpart in a recipe; {nearest(a['optim'], known)}")


def _check_precision(a: Arguments) -> None:
    if a["bf16"] and a["fp16"]:
        raise RecipeError("fp16: bf16 is given too; keep one")
    for mixed in ("bf16", "fp16"):
        if a[f"{mixed}_full_eval"] and not a[mixed]:
            raise RecipeError(f"{mixed}_full_eval: a recipe evaluates in the 16 bits that it trains with; write "
                              f"{mixed}=True too, or {mixed}_full_eval=False")


def _check_checkpointing(a: Arguments) -> None:
    given = a["gradient_checkpointing_kwargs"] or {} if a["gradient_checkpointing"] else {}
    for name, value in given.items():
        if name != "every_n_layers" and NEUTRAL.get(name) is not value:
            instead = f"write {NEUTRAL[name]}" if name in NEUTRAL else "leave it out"
            raise RecipeError(f"gradient_checkpointing_kwargs: {name}={value!r} is not in a recipe; {instead}")


CHECKS: Mapping[str, Callable[[Arguments], None]] = {
    "precision": _check_precision, "checkpointing": _check_checkpointing,
}  # fmt: skip
"""By slot, what refuses values that no variant has a place for."""


PARTS: tuple[Callable[[Arguments, Arguments], Values], ...] = (
    _plain_fields, _batch, _steps, *(partial(_technique, slot) for slot in TECHNIQUES),
)  # fmt: skip


def _wrong_types(a: Arguments) -> list[str]:
    reasons = []
    for name, (default, _, kinds) in MAPPED.items():
        value = a[name]
        if value is None and default is None:
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            reasons.append(f"{name}: {value!r} should be {WORDS[kinds[-1]]}")
    return reasons

"""TrainingArguments, as an object, a mapping or a JSON file, to complete plain values, and those to a recipe's."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from tightfit.errors import RecipeError, nearest
from tightfit.recipe.hf_arguments.table import DEFAULTS, MAPPED, RENAMED, unknown
from tightfit.techniques import SLOTS

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

DERIVED_OUTPUT_DIR = "trainer_output"
"""TrainingArguments' own value where no output_dir is given."""


def read(source: Any) -> dict[str, Any]:
    """The arguments that `source` names, as plain values: strings, numbers, lists and mappings.

    An object's arguments that tightfit does not know are left out while they have their default. Raises RecipeError
    for other unknown ones, for a file that cannot be read, and for what is no TrainingArguments.
    """
    if isinstance(source, str | Path):
        given = _read_json(Path(source))
    elif isinstance(source, Mapping):
        given = dict(source)
    elif dataclasses.is_dataclass(source) and hasattr(source, "per_device_train_batch_size"):
        given = _read_object(source)
    else:
        raise RecipeError(
            f"training arguments: {source!r} is none; give a TrainingArguments, a mapping, or a JSON file's path"
        )
    for old, new in RENAMED.items():
        if old in given and new in given:
            raise RecipeError(f"{old}: the older name of {new}, which is given too; keep {new}")
        if old in given:
            given[new] = given.pop(old)
    if strange := [name for name in given if name not in DEFAULTS]:
        raise RecipeError("; ".join(unknown(str(name)) for name in strange))
    return {name: _plain(value) for name, value in given.items()}


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument, with defaults and with what TrainingArguments derives from others, each in one spelling."""
    a = {**DEFAULTS, **given}
    if a["output_dir"] == DERIVED_OUTPUT_DIR:
        a["output_dir"] = None
    if a["report_to"] in (None, [], ["none"], [None]):
        a["report_to"] = "none"
    elif isinstance(a["report_to"], str) and a["report_to"] != "none":
        a["report_to"] = [a["report_to"]]
    if isinstance(a["include_num_input_tokens_seen"], bool):
        a["include_num_input_tokens_seen"] = "all" if a["include_num_input_tokens_seen"] else "no"
    if a["hub_token"] == "<HUB_TOKEN>":  # to_dict writes this, with a token or without
        a["hub_token"] = None
    for name in ("gradient_checkpointing_kwargs", "lr_scheduler_kwargs", "accelerator_config", "deepspeed"):
        if isinstance(a[name], str) and a[name].startswith("{"):
            try:
                a[name] = json.loads(a[name])
            except ValueError as error:
                raise RecipeError(f"{name}: {a[name]!r} is not JSON ({error})") from None
    for name in ("lr_scheduler_kwargs", "fsdp_config", "deepspeed"):
        a[name] = a[name] or None
    a["fsdp"], a["debug"] = a["fsdp"] or None, a["debug"] or ""
    a["disable_tqdm"] = a["disable_tqdm"] or None  # False says the same as no value
    usual = {"even_batches": True, "use_seedable_sampler": True}
    accelerator = a["accelerator_config"]
    if isinstance(accelerator, Mapping) and all((v or False) == usual.get(k, False) for k, v in accelerator.items()):
        a["accelerator_config"] = None  # Accelerate's own defaults
    if a["torch_compile_mode"] is not None or a["torch_compile_backend"] is not None:
        a["torch_compile"] = True
    if a["torch_compile"] and a["torch_compile_backend"] is None:
        a["torch_compile_backend"] = "inductor"
    if a["eval_strategy"] != "no":
        a["do_eval"] = True
    if a["eval_strategy"] == "steps":
        a["eval_steps"] = a["eval_steps"] or a["logging_steps"]
    if a["use_cpu"] is True:
        a["dataloader_pin_memory"] = False
    return a


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise RecipeError(f"{path}: cannot be read ({reason}); write args.to_json_string() into it") from None
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not JSON ({error}); write args.to_json_string() into it") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: should be an object of arguments; write args.to_json_string() into it")
    return values


def _read_object(source: Any) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(source)}
    return {name: value for name, value in source.to_dict().items() if name in DEFAULTS or value != defaults[name]}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def recipe_values(a: Arguments, defaults: Arguments) -> tuple[Values, list[str]]:
    """A recipe's values for complete arguments, and reasons, each naming its argument, why some have none.

    defaults: the recipe's own, for max_steps, save_total_limit and logging_steps where the arguments have no number.
    """
    if reasons := _wrong_types(a):
        return {}, reasons
    values: Values = {}
    parts: list[Callable[[Arguments, Arguments], Values]] = [_plain_fields, _batch, _steps]
    parts += [partial(_technique, slot) for slot in TECHNIQUES]
    for part in parts:
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
    if slot == "precision":
        _check_precision(a)
    if slot == "checkpointing":
        _check_checkpointing(a)
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


def _wrong_types(a: Arguments) -> list[str]:
    reasons = []
    for name, (default, _, kinds) in MAPPED.items():
        value = a[name]
        if value is None and default is None:
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            reasons.append(f"{name}: {value!r} should be {WORDS[kinds[-1]]}")
    return reasons

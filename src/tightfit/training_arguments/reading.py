"""Reading TrainingArguments: an object, a mapping or a JSON file to complete plain values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from tightfit.errors import RecipeError
from tightfit.training_arguments.table import DEFAULTS, RENAMED, unknown

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
            a[name] = _json_text(name, a[name])
    for name in ("lr_scheduler_kwargs", "fsdp_config", "deepspeed"):
        a[name] = a[name] or None
    a["fsdp"], a["debug"] = a["fsdp"] or None, a["debug"] or ""
    a["disable_tqdm"] = a["disable_tqdm"] or None  # False says the same as no value
    a["accelerator_config"] = _accelerator_config(a["accelerator_config"])
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
    given = {}
    for field in dataclasses.fields(source):
        value = getattr(source, field.name, field.default)
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if field.init and (field.name in DEFAULTS or value != made):
            given[field.name] = value
    if given.get("disable_tqdm") is _tqdm_disabled_by_log_level():
        given["disable_tqdm"] = None  # what TrainingArguments itself fills in
    return given


def _tqdm_disabled_by_log_level() -> bool:
    from transformers.utils import logging

    return bool(logging.get_verbosity() > logging.WARNING)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.to_dict() if hasattr(value, "to_dict") else value


def _json_text(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RecipeError(f"{name}: {text!r} is not JSON ({error})") from None


def _accelerator_config(value: Any) -> Any:
    """None for Accelerate's own defaults."""
    usual = {"even_batches": True, "use_seedable_sampler": True}
    is_usual = isinstance(value, Mapping) and all((v or False) == usual.get(k, False) for k, v in value.items())
    return None if is_usual else value

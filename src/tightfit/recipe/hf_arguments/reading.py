"""Arguments as they are written: an object, a mapping, or a file; those of transformers 3 and 4 as today's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from tightfit.errors import RecipeError
from tightfit.recipe.hf_arguments import sft, table
from tightfit.recipe.yaml_text import read_yaml

RENAMED: Mapping[str, str] = {
    "evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size", "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}
"""Names that are read as today's."""

SAYS_NOTHING: Mapping[str, Any] = {
    **table.ASIDE, "local_rank": 0, "include_num_input_tokens_seen": False, "include_for_metrics": None,
}
"""Values that said then what leaving the argument out says today."""

DROPPED_ARGUMENTS = ("push_to_hub_token", "_n_gpu")
"""A secret, which `to_dict` hides, and what a machine happened to have."""


def read_arguments(source: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The arguments that `source` names, as plain values: strings, numbers, lists and mappings; apart from them
    SFTConfig's own, all or none; and a sentence on each that tightfit does not know.

    Such ones of an object are left out while they have their default. Raises RecipeError for a file that cannot be
    read, and for what is no TrainingArguments.
    """
    names = {*table.DEFAULTS, *table.ASIDE, *sft.SFT_ARGUMENTS}
    if isinstance(source, str | Path):
        given = _read_file(Path(source))
    elif isinstance(source, Mapping):
        given = dict(source)
    elif dataclasses.is_dataclass(source) and hasattr(source, "per_device_train_batch_size"):
        usual = {field.name: field.default for field in dataclasses.fields(source)}
        values: dict[str, Any] = source.to_dict()  # type: ignore[union-attr]
        values |= {name: getattr(source, name) for name in ("eos_token", "pad_token") if name in values}  # hidden there
        if not is_sft_config(source):  # another of trl's, whose names mean something else
            names -= {*sft.SFT_ARGUMENTS, *sft.KEPT_ARGUMENTS}
        given = {name: value for name, value in values.items()
                 if name in names - table.ASIDE.keys() or value != usual[name]}
    else:
        raise RecipeError(
            f"training arguments: {source!r} cannot be read; give a TrainingArguments, a mapping, or a file's path"
        )
    given = _as_today(given)
    known = {name: value.value if isinstance(value, Enum) else value for name, value in given.items() if name in names}
    return *sft.divide(known), [table.unknown(str(name)) for name in given if name not in names]


def is_sft_config(source: Any) -> bool:
    """Whether an object is an SFTConfig."""
    return hasattr(source, "dataset_text_field")


def left_by_arguments(values: Mapping[str, Any], source: Any) -> dict[str, Any]:
    """A recipe file's values without those that the arguments of `source` stand above. Raises RecipeError as
    `read_arguments` does."""
    said, _ = sft.recipe_values(read_arguments(source)[1])
    left = {field: value for field, value in values.items() if not table.arguments_of(field) and field not in said}
    if isinstance(data := left.get("data"), Mapping):
        left["data"] = {name: value for name, value in data.items() if f"data.{name}" not in said}
    return left


def _read_file(path: Path) -> dict[str, Any]:
    """The arguments of a JSON file, or of YAML as trl's `--config` takes it."""
    try:
        text = path.read_text("utf-8")
        if path.suffix in (".yaml", ".yml"):
            return read_yaml(text, example="learning_rate: 5e-5")
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError, RecursionError, RecipeError) as error:
        raise RecipeError(f"{path}: cannot be read as arguments ({getattr(error, 'strerror', None) or error}); write "
                          "args.to_json_string() into it, or name another file") from None
    return values


def _as_today(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with older ones in today's names, those that have none and say nothing left out, and none for
    tokens, in place of which a dump has their names in any case. Raises RecipeError for an older and a newer name that
    contradict each other."""
    found = {name: None if value == f"<{str(name).upper()}>" else value for name, value in given.items()}
    for old, new in RENAMED.items():
        value, default = found.pop(old, None), table.DEFAULTS[new]
        if value is None or (value == default and new in found):  # a dump holds both, the older at its default
            continue
        if found.get(new, default) not in (default, value):
            raise RecipeError(f"{old}: the older name of {new}, which is given too; keep {new}")
        found[new] = value
    if ratio := found.pop("warmup_ratio", None):  # steps stand above it
        found["warmup_steps"] = found.get("warmup_steps") or ratio
    if found.pop("group_by_length", False):
        found["train_sampling_strategy"] = "group_by_length"
    if found.pop("adafactor", False):
        found["optim"] = "adafactor"
    return {name: value for name, value in found.items()
            if name not in DROPPED_ARGUMENTS and value != SAYS_NOTHING.get(name, found)}

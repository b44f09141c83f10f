"""Arguments as they are written: an object, a mapping, or a JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from tightfit.errors import RecipeError
from tightfit.recipe.hf_arguments import table
from tightfit.recipe.hf_arguments.former import as_today


def read_arguments(source: Any) -> tuple[dict[str, Any], list[str]]:
    """The arguments that `source` names, as plain values: strings, numbers, lists and mappings; and a sentence on each
    that tightfit does not know.

    Such ones of an object are left out while they have their default. Raises RecipeError for a file that cannot be
    read, and for what is no TrainingArguments.
    """
    if isinstance(source, str | Path):
        given = _read_json(Path(source))
    elif isinstance(source, Mapping):
        given = dict(source)
    elif dataclasses.is_dataclass(source) and hasattr(source, "per_device_train_batch_size"):
        usual = {field.name: field.default for field in dataclasses.fields(source)}
        values: dict[str, Any] = source.to_dict()  # type: ignore[union-attr]
        given = {name: value for name, value in values.items() if name in table.DEFAULTS or value != usual[name]}
    else:
        raise RecipeError(
            f"training arguments: {source!r} cannot be read; give a TrainingArguments, a mapping, or a JSON file's path"
        )
    given = as_today(given)
    unknown = [name for name in given if name not in table.DEFAULTS and name not in table.ASIDE]
    known = {name: value.value if isinstance(value, Enum) else value for name, value in given.items()
             if name not in unknown}
    return known, [table.unknown(str(name)) for name in unknown]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: cannot be read as a JSON object of arguments ({error}); write "
                          "args.to_json_string() into it") from None
    return values

"""Extra flags for XLA, given with each compilation and tried first: one that XLA does not know must not end a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from tightfit.errors import RecipeError, one_line

FIELD = "backend.xla_flags"


def compiler_options(flags: Sequence[str], devices: Sequence[Any]) -> dict[str, Any]:
    """The flags as options of a compilation for `devices`. Raises RecipeError naming one that cannot be used."""
    options = dict(map(_parsed, flags))
    for name, value in options.items():
        small = jax.ShapeDtypeStruct((8,), "float32", sharding=SingleDeviceSharding(devices[0]))
        try:
            jax.jit(lambda x: x + x).lower(small).compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as error:
            raise RecipeError(f"{FIELD}: {name} cannot be used ({one_line(error)}); leave it out, or write one that "
                              "this version of XLA knows") from None
    return options


def _parsed(flag: str) -> tuple[str, Any]:
    """`--xla_name=value` as a name and a plain value."""
    name, equals, text = flag.removeprefix("--").partition("=")
    if not name.startswith("xla_"):
        raise RecipeError(f"{FIELD}: {flag!r} should read --xla_NAME=VALUE")
    if not equals or text.lower() in ("true", "false"):
        return name, text.lower() != "false"
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text

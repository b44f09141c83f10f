"""Extra flags for XLA, given with each compilation rather than to the process, and tried in a child process first: an
unknown one, or one that XLA cannot stand, must not end the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tightfit.errors import RecipeError

TRIAL = """
import json, sys
import jax
place = jax.sharding.SingleDeviceSharding(jax.devices(sys.argv[1])[0])
lowered = jax.jit(lambda x: x + x).lower(jax.ShapeDtypeStruct((8, 8), "float32", sharding=place))
for name, value in json.loads(sys.argv[2]).items():
    print(name, flush=True)
    lowered.compile(compiler_options={name: value})
print("all", flush=True)
"""
"""Compiles a small program with each flag, saying before which comes next."""


def compiler_options(flags: Sequence[str], devices: Sequence[Any]) -> dict[str, Any]:
    """The flags as options of a compilation for `devices`. Raises RecipeError naming one that cannot be used."""
    if not flags:
        return {}
    options = dict(map(_parsed, flags))
    platform = "cpu" if devices[0].platform == "cpu" else "gpu"
    done = subprocess.run(
        [sys.executable, "-c", TRIAL, platform, json.dumps(options)], capture_output=True, text=True, check=False,
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # this process may hold the GPU's memory
    )
    said = done.stdout.split()
    if done.returncode or said[-1:] != ["all"]:
        named = said[-1] if said else flags[0]
        reason = ([line for line in done.stderr.splitlines() if line.strip()] or [f"exit {done.returncode}"])[-1]
        raise RecipeError(f"xla_flags: {named} cannot be used ({' '.join(reason.split())[:300]}); leave it out, or "
                          "write one that this version of XLA knows")
    return options


def _parsed(flag: str) -> tuple[str, Any]:
    """`--xla_name=value` as a name and a plain value."""
    name, equals, text = flag.removeprefix("--").partition("=")
    if not name.startswith("xla_"):
        raise RecipeError(f"xla_flags: {flag!r} should read --xla_NAME=VALUE")
    if not equals or text.lower() in ("true", "false"):
        return name, text.lower() != "false"
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text

"""Tiny recipes of the JAX backend, and their builds, steps and global batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from tightfit.backends.jax.backend import JaxBackend
from tightfit.backends.jax.build import Build
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe

SCANNED, UNROLLED = {"name": "jax", "layers": "scanned"}, {"name": "jax", "layers": "unrolled"}

TINY: dict[str, Any] = {
    "backend": SCANNED, "device": "cpu", "model": "transformer-156m", "vocab_size": 64, "seq_len": 8, "batch_size": 4,
    "model_overrides": {
        "hidden_size": 16, "num_layers": 3, "num_heads": 2, "head_dim": 8, "max_seq_len": 12, "dropout_rate": 0.0,
    },
    "micro_batch_size": 2, "data": {"source": "dummy", "samples": 8}, "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
}  # fmt: skip

FAST = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
"""Options of XLA's that compile tiny models in a fraction of the time; those that a version lacks are left out."""


@cache
def fast_options() -> dict[str, Any]:
    """Those of `FAST` that this version of XLA knows."""
    return {name: value for name, value in FAST.items() if _known(name, value)}


def _known(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x + 1).lower(jnp.ones(1)).compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


def quickly(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function's result, compiled without optimization."""
    return jax.jit(function).lower(*arguments).compile(compiler_options=fast_options())(*arguments)


def recipe(**changes: Any) -> Recipe:
    """The tiny recipe, resolved, with some fields changed; those of `model_overrides` one by one."""
    overrides = {**TINY["model_overrides"], **changes.pop("model_overrides", {})}
    if changes.get("model", TINY["model"]) != TINY["model"]:
        overrides = {name: value for name, value in overrides.items() if name not in TINY["model_overrides"]}
    wanted = Recipe.from_dict({**TINY, **changes, "model_overrides": overrides})
    return resolve(wanted, JaxBackend().device(wanted))


def build(**changes: Any) -> Build:
    """The tiny recipe's build."""
    made = recipe(**changes)
    backend = JaxBackend()
    return backend.build(made, backend.device(made))

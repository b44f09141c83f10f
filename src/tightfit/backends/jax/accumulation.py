"""Gradient accumulation: the micro-batches of a global batch one after the other, or in a loop of the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tightfit.backends.jax.build import Build
from tightfit.techniques.accumulation import Loop, Scan


def loop(technique: Loop, build: Build) -> Build:
    return replace(build, sum_gradients=_loop)


def scan(technique: Scan, build: Build) -> Build:
    return replace(build, sum_gradients=_scan)


def _loop(compute: Callable[[Any, jax.Array], Any], batches: Any, count: int) -> Any:
    total = None
    for number in range(count):
        found = compute(jax.tree.map(lambda a, n=number: a[n], batches), jnp.int32(number))
        total = found if total is None else _added(total, found)
    return total


def _scan(compute: Callable[[Any, jax.Array], Any], batches: Any, count: int) -> Any:
    if count == 1:
        return _loop(compute, batches, count)

    def add(total: Any, turn: tuple[Any, jax.Array]) -> tuple[Any, None]:
        return _added(total, compute(*turn)), None

    first = jax.eval_shape(compute, jax.tree.map(lambda a: a[0], batches), jnp.int32(0))
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), first)
    total, _ = jax.lax.scan(add, nothing, (batches, jnp.arange(count, dtype=jnp.int32)))
    return total


def _added(total: Any, found: Any) -> Any:
    with jax.named_scope("accumulation"):
        return jax.tree.map(jnp.add, total, found)

"""Updates of weights that are bf16 themselves: computed in fp32, and rounded so that small ones are not lost."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp

from tightfit.backends.jax.build import Optimizer
from tightfit.backends.jax.network import Params
from tightfit.techniques.precision import Rounding

EXPONENT, MANTISSA = 8, 7
"""Bits of bfloat16."""


def in_bf16(optimizer: Optimizer, rounding: Rounding) -> Optimizer:
    """An optimizer of fp32 weights as one of bf16 weights, whose states are kept in the formats that they begin in.

    Its state adds what the rounding needs: with `kahan` what each weight lost so far, with `stochastic` the number of
    updates, which its random numbers come from.
    """

    def init(params: Params) -> dict[str, Any]:
        return {"states": optimizer.init(params), **_begun(params, rounding)}

    def update(
        gradients: Params, state: dict[str, Any], params: Params, learning_rate: jax.Array
    ) -> tuple[Params, dict[str, Any]]:
        weights = widened(params)
        if rounding == "kahan":
            weights = jax.tree.map(jnp.add, weights, widened(state["lost"]))
        fresh, states = optimizer.update(widened(gradients), widened(state["states"]), weights, learning_rate)
        found: dict[str, Any] = {"states": narrowed(states, state["states"])}
        if rounding == "stochastic":
            found["updates"] = state["updates"] + 1
            key = jax.random.fold_in(jax.random.key(0), state["updates"])
            return {name: _at_random(jax.random.fold_in(key, crc32(name.encode()) & 0x7FFFFFFF), weight)
                    for name, weight in fresh.items()}, found  # fmt: skip
        nearest = {name: _nearest(weight) for name, weight in fresh.items()}
        if rounding == "kahan":
            found["lost"] = {name: (fresh[name] - nearest[name]).astype(jnp.bfloat16) for name in fresh}
        return {name: weight.astype(jnp.bfloat16) for name, weight in nearest.items()}, found

    return Optimizer(init, update)


def _begun(params: Params, rounding: Rounding) -> dict[str, Any]:
    if rounding == "kahan":
        return {"lost": {name: jnp.zeros_like(weight) for name, weight in params.items()}}
    return {"updates": jnp.int32(0)} if rounding == "stochastic" else {}


def widened(tree: Any) -> Any:
    """The tree with its bf16 arrays in fp32."""
    return jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, tree)


def narrowed(new: Any, old: Any) -> Any:
    """The new tree in the formats of the old one."""
    return jax.tree.map(lambda a, b: a.astype(b.dtype), new, old)


def _nearest(weight: jax.Array) -> jax.Array:
    """Rounded, still as fp32. A cast there and back XLA may leave out, and keep more digits than are asked."""
    return jax.lax.reduce_precision(weight, EXPONENT, MANTISSA)


def _at_random(key: jax.Array, weight: jax.Array) -> jax.Array:
    """Rounded up or down, each as likely as the other is far."""
    noise = jax.random.bits(key, weight.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(weight, jnp.uint32) + noise
    cut = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(weight), cut, weight).astype(jnp.bfloat16)

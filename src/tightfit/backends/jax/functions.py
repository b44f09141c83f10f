"""The functions that models share. Matrix products run in the pass's format, norms in fp32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tightfit.backends.jax.network import Params

ATTENTION = "attention"
"""The name of attention's result, for checkpointing that keeps results by name."""


def linear(params: Params, name: str, x: jax.Array, dtype: Any, called: str | None = None) -> jax.Array:
    """`x` (..., in) times the transposed matrix `name.weight` (out, in), plus `name.bias` where there is one.

    called: the product's name, where checkpointing chooses what to keep.
    """
    product = jax.lax.dot_general(
        x.astype(dtype), params[f"{name}.weight"].astype(dtype), (((x.ndim - 1,), (1,)), ((), ()))
    )
    return _finished(params, name, product, dtype, called)


def linear_in_out(params: Params, name: str, x: jax.Array, dtype: Any, called: str | None = None) -> jax.Array:
    """As `linear`, over a matrix that lies as (in, out)."""
    product = x.astype(dtype) @ params[f"{name}.weight"].astype(dtype)
    return _finished(params, name, product, dtype, called)


def _finished(params: Params, name: str, product: jax.Array, dtype: Any, called: str | None) -> jax.Array:
    bias = params.get(f"{name}.bias")
    if bias is not None:
        product = product + bias.astype(dtype)
    return product if called is None else checkpoint_name(product, called)


def layer_norm(params: Params, name: str, x: jax.Array, eps: float, dtype: Any) -> jax.Array:
    """Layer normalization over the last axis, with `name.weight` and `name.bias`."""
    with jax.named_scope("norm"):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = wide.mean(-1, keepdims=True)
        # The variance in one pass: of two passes XLA keeps more for the backward pass, and plans three times as long.
        variance = jnp.maximum(jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean), 0.0)
        scale = jax.lax.rsqrt(variance + eps) * params[f"{name}.weight"]
        return ((wide - mean) * scale + params[f"{name}.bias"]).astype(dtype)


def rms_norm(params: Params, name: str, x: jax.Array, eps: float, dtype: Any) -> jax.Array:
    """Division by the root mean square over the last axis, with `name.weight`."""
    with jax.named_scope("norm"):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
        return (normed * params[f"{name}.weight"]).astype(dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero a share `rate` of `x` at random and scale up the rest; `x` itself without a key."""
    if key is None or not rate:
        return x
    with jax.named_scope("dropout"):
        kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
        return jnp.where(kept, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))


def lookup(table: jax.Array, ids: jax.Array, dtype: Any) -> jax.Array:
    """Rows of `table` (rows, width) at `ids` (...): (..., width)."""
    return jnp.take(table.astype(dtype), ids, axis=0)

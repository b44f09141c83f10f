"""Attention functions, and the mask of which positions may see each other.

An attention function takes query (B, T, heads, head_dim), key and value (B, T, key heads, head_dim), and by name:
`mask`, bool that broadcasts to (B, 1, T, T), or None; `causal`; `scale`; and, where weights are dropped,
`dropout_rate` and `dropout_key`. It returns (B, T, heads, head_dim).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tightfit.backends.jax.build import Build
from tightfit.backends.jax.network import ATTENTION, dropout
from tightfit.errors import Refused
from tightfit.techniques.attention import Eager, Sdpa

IMPLEMENTATIONS = {"auto": None, "math": "xla", "cudnn": "cudnn"}
"""JAX's names of the technique's kernels; None lets JAX choose."""


def eager(technique: Eager, build: Build) -> Build:
    return replace(build, attention_fn=partial(eager_attention, softmax_dtype=build.network.softmax_dtype))


def sdpa(technique: Sdpa, build: Build) -> Build:
    """jax.nn.dot_product_attention. Where it cannot serve the model, a named kernel is refused; `auto` falls back to
    eager and says so."""
    dropped, softmax = build.network.attention_dropout, build.network.softmax_dtype
    unserved = []
    if dropped is not None:
        unserved.append(f"has no dropout; write model_overrides.{dropped}=0")
    if softmax != "float32":
        unserved.append("computes its softmax in float32; write model_overrides.softmax_dtype=float32")
    if not unserved:
        implementation = IMPLEMENTATIONS[technique.kernel]
        return replace(build, attention_fn=partial(dot_product_attention, implementation=implementation))
    if technique.kernel != "auto":
        raise Refused(f"attention.kernel: JAX's attention {unserved[0]}, or attention=eager")
    note = f"attention: eager is used, since JAX's own {' and '.join(each.partition(';')[0] for each in unserved)}"
    return eager(Eager(), replace(build, notes=(*build.notes, note)))


def eager_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, mask: jax.Array | None, causal: bool, scale: float,
    softmax_dtype: str, dropout_rate: float = 0.0, dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Products and a softmax, the scores and the softmax in `softmax_dtype`."""
    rows, length, heads, width = query.shape
    shared = key.shape[2]
    wide = jnp.dtype(softmax_dtype)
    # An axis of groups only where heads share keys: for one of length 1 XLA transposes all saved scores once more.
    group = "g" if shared < heads else ""
    scaled = query * scale
    if group:
        scaled = scaled.reshape(rows, length, shared, heads // shared, width)
    scores = jnp.einsum(f"bqk{group}h,bskh->bk{group}qs", scaled.astype(wide), key.astype(wide))
    seen = mask
    if causal:
        ordered = jnp.tril(jnp.ones((1, 1, length, length), bool))
        seen = ordered if seen is None else seen & ordered
    if seen is not None:
        scores = jnp.where(seen[:, :, None] if group else seen, scores, jnp.finfo(wide).min)
    with jax.named_scope("softmax"):
        weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    weights = dropout(weights, dropout_rate, dropout_key)
    mixed = jnp.einsum(f"bk{group}qs,bskh->bqk{group}h", weights, value).reshape(query.shape)
    return checkpoint_name(mixed, ATTENTION)


def dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, mask: jax.Array | None, causal: bool, scale: float,
    implementation: Any, dropout_rate: float = 0.0, dropout_key: jax.Array | None = None,
) -> jax.Array:
    """JAX's own function, its softmax in fp32."""
    assert not dropout_rate or dropout_key is None, "sdpa serves no model that drops attention weights"
    mixed = jax.nn.dot_product_attention(
        query, key, value, mask=mask, scale=scale, is_causal=causal, implementation=implementation
    )
    return checkpoint_name(mixed, ATTENTION)


def attention_mask(batch: dict[str, jax.Array]) -> jax.Array | None:
    """Positions that may see each other besides the model's own causality: those of one document, and real ones.

    batch: arrays of a micro-batch, with `document_ids` (B, T) or `padding` (B, T) where there are any.
    """
    if (documents := batch.get("document_ids")) is not None:
        return documents[:, None, :, None] == documents[:, None, None, :]
    if (padding := batch.get("padding")) is not None:
        return jnp.broadcast_to(padding[:, None, None, :], (*padding.shape[:1], 1, padding.shape[1], padding.shape[1]))
    return None

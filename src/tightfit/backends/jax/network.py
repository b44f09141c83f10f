"""Models as functions over a flat dict of arrays whose names are those of their checkpoints.

Layers are alike, so each of their weights is one array with the layers along its first axis; in its name `*` stands
where a checkpoint writes a layer's number. Matrices lie as in the checkpoint too. Matrix products run in the pass's
format, norms in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tightfit.tasks import Array

LAYER = "*"
ATTENTION = "attention"
"""The name of attention's result, for checkpointing that keeps results by name."""

Params = dict[str, jax.Array]
AttentionFn = Callable[..., jax.Array]
"""(query, key, value, *, mask, causal, scale, dropout_rate, dropout_key) -> mixed; see `attention`."""


class Weight(NamedTuple):
    """The shape of one parameter, of one layer where its name has `*`, and its initializer: (key, shape, dtype) ->
    array."""

    shape: tuple[int, ...]
    init: Callable[..., jax.Array]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The context that all layers of one forward pass share.

    dtype: what products are computed in. attention_fn: the attention function. mask: (B, 1, T, T) bool, or one that
    broadcasts to it, which positions may see which besides the model's own causality; None where all may.
    positions: (B, T) int32. key: of this pass's dropout; None where nothing is dropped.
    """

    dtype: Any
    attention_fn: AttentionFn
    mask: jax.Array | None
    positions: jax.Array
    key: jax.Array | None = None

    def keys(self, *place: int | jax.Array) -> jax.Array | None:
        """The random key of one place in the model."""
        key = self.key
        for number in place:
            key = None if key is None else jax.random.fold_in(key, number)
        return key


class Branch(NamedTuple):
    """One of the residual branches of a layer, `mlp` or `attention`.

    function: (a layer's parameters by their names inside the layer, (B, T, width), forward, random key) -> what is
    added to the (B, T, width).
    """

    name: str
    function: Callable[[Params, jax.Array, Forward, jax.Array | None], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A model's shape and functions; it holds no array.

    config: what it was made from, with its numbers. depth: its layers. outputs: logits of each position.
    weights: by canonical name. branches: a layer's branches, in order.
    products: names of a layer's matrix products, in order, as `checkpoint_name` gives them.
    embed: (params, token ids (B, T), forward) -> (B, T, width). head: (params, (B, T, width), forward) -> logits.
    attention_dropout: the configuration field that drops attention weights, where that is not 0.
    softmax_dtype: the number format of attention's softmax.
    stored_prefix: what some checkpoints leave out at the beginning of names. unstored: parts of names of buffers that
    checkpoints may hold besides.
    """

    config: Any
    depth: int
    outputs: int
    weights: Mapping[str, Weight]
    branches: tuple[Branch, ...]
    products: tuple[str, ...]
    embed: Callable[[Params, jax.Array, Forward], jax.Array]
    head: Callable[[Params, jax.Array, Forward], jax.Array]
    attention_dropout: str | None = None
    softmax_dtype: str = "float32"
    stored_prefix: str = ""
    unstored: tuple[str, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Each array's shape, the layers along the first axis."""
        return {
            name: (self.depth, *weight.shape) if is_stacked(name) else weight.shape
            for name, weight in self.weights.items()
        }

    def checkpoint_names(self, name: str) -> list[str]:
        """The names of an array's weights in a checkpoint: one, or one for each layer."""
        return [name.replace(LAYER, str(number), 1) for number in range(self.depth)] if is_stacked(name) else [name]

    def unstack_layers(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays by their weights' names in a checkpoint, each layer apart."""
        return {full: np.array(part) for name, array in arrays.items()
                for full, part in zip(self.checkpoint_names(name), array if is_stacked(name) else [array], strict=True)}

    def stack_layers(self, weights: dict[str, Array]) -> dict[str, Array]:
        """The inverse of `unstack_layers`, of all weights. It empties `weights`, so that each is held about once."""
        return {name: np.stack([weights.pop(full) for full in self.checkpoint_names(name)]) if is_stacked(name)
                else weights.pop(name) for name in self.weights}

    @property
    def parameter_count(self) -> int:
        """Number of parameters, shared ones once."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def init(self, key: jax.Array) -> Params:
        """Initial weights."""
        shapes = self.shapes()
        return {name: weight.init(fold_in_name(key, name), shapes[name], jnp.float32)
                for name, weight in self.weights.items()}


def is_stacked(name: str) -> bool:
    """Whether the array of that name holds every layer's."""
    return LAYER in name


def layers_of(params: Params) -> Params:
    """The stacked arrays, by their names inside a layer."""
    return {name.split(f"{LAYER}.", 1)[1]: array for name, array in params.items() if is_stacked(name)}


def fold_in_name(key: jax.Array, name: str) -> jax.Array:
    """The random stream of one array, from its name."""
    return jax.random.fold_in(key, crc32(name.encode()) & 0x7FFFFFFF)


def linear(params: Params, name: str, x: jax.Array, dtype: Any, *, in_out: bool = False) -> jax.Array:
    """`x` (..., in) times the matrix `name.weight`, plus `name.bias` where there is one, under its name for
    checkpointing that chooses what to keep. in_out: whether the matrix lies as (in, out), not (out, in)."""
    contracted = (((x.ndim - 1,), (0 if in_out else 1,)), ((), ()))
    product = jax.lax.dot_general(x.astype(dtype), params[f"{name}.weight"].astype(dtype), contracted)
    bias = params.get(f"{name}.bias")
    return checkpoint_name(product if bias is None else product + bias.astype(dtype), name)


def layer_norm(params: Params, name: str, x: jax.Array, dtype: Any, *, eps: float) -> jax.Array:
    """Layer normalization over the last axis, with `name.weight` and `name.bias`."""
    with jax.named_scope("norm"):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = wide.mean(-1, keepdims=True)
        # The variance in one pass: of two passes XLA keeps more for the backward pass, and plans three times as long.
        variance = jnp.maximum(jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean), 0.0)
        scale = jax.lax.rsqrt(variance + eps) * params[f"{name}.weight"]
        return ((wide - mean) * scale + params[f"{name}.bias"]).astype(dtype)


def rms_norm(params: Params, name: str, x: jax.Array, dtype: Any, *, eps: float) -> jax.Array:
    """Division by the root mean square over the last axis, with `name.weight`."""
    with jax.named_scope("norm"):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
        return (normed * params[f"{name}.weight"]).astype(dtype)


def dropout(x: jax.Array, rate: float | None, key: jax.Array | None) -> jax.Array:
    """Zero a share `rate` of `x` at random and scale up the rest; `x` itself without a key or a rate."""
    if key is None or not rate:
        return x
    with jax.named_scope("dropout"):
        kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
        return jnp.where(kept, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))

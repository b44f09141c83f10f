"""Models as functions over a flat dict of arrays whose names are those of their checkpoints.

Layers are alike, so each of their weights is one array with the layers along its first axis; in its name `*` stands
where a checkpoint writes a layer's number. Matrices lie as in the checkpoint too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

from tightfit.tasks import Array

LAYER = "*"

Params = dict[str, jax.Array]
Initializer = Callable[..., jax.Array]
"""(key, shape, dtype) -> array."""
Attend = Callable[..., jax.Array]
"""(query, key, value, *, allowed, causal, scale, dropout_rate, dropout_key) -> mixed; see `attention`."""

TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a unit normal cut off at two standard deviations."""


class Weight(NamedTuple):
    """The shape of one parameter, of one layer where its name has `*`, and how it is drawn."""

    shape: tuple[int, ...]
    draw: Initializer


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The context that all layers of one forward pass share.

    dtype: what products are computed in. attend: the attention function. allowed: (B, 1, T, T) bool, or one that
    broadcasts to it, which positions may see which besides the model's own causality; None where all may.
    positions: (B, T) int32. key: of this pass's dropout; None where nothing is dropped.
    """

    dtype: Any
    attend: Attend
    allowed: jax.Array | None
    positions: jax.Array
    key: jax.Array | None = None

    def keys(self, *place: int | jax.Array) -> jax.Array | None:
        """The random key of one place in the model."""
        key = self.key
        for number in place:
            key = None if key is None else jax.random.fold_in(key, number)
        return key


PartFunction = Callable[[Params, jax.Array, Forward, jax.Array | None], jax.Array]
"""(a layer's parameters by their names inside the layer, (B, T, width), what is shared, random key) -> what is added
to the (B, T, width)."""


class Part(NamedTuple):
    """One of the residual branches of a layer: `mlp` or `attention`."""

    name: str
    function: PartFunction


@dataclass(frozen=True, kw_only=True)
class Network:
    """A model's shape and functions; it holds no array.

    config: what it was made from, with its numbers. depth: its layers. outputs: logits of each position.
    weights: by canonical name, in the model's order. parts: a layer's branches, in order.
    products: names of a layer's matrix products, in order, as `checkpoint_name` gives them.
    embed: (params, token ids (B, T), forward) -> (B, T, width). head: (params, (B, T, width), forward) -> logits.
    causal: whether a position sees only those before it.
    attention_dropout: the configuration field that drops attention weights, where that is not 0.
    softmax_dtype: the number format of attention's softmax.
    stored_prefix: what some checkpoints leave out at the beginning of names. unstored: parts of names of buffers that
    checkpoints may hold besides.
    """

    config: Any
    depth: int
    outputs: int
    weights: Mapping[str, Weight]
    parts: tuple[Part, ...]
    products: tuple[str, ...]
    embed: Callable[[Params, jax.Array, Forward], jax.Array]
    head: Callable[[Params, jax.Array, Forward], jax.Array]
    causal: bool = True
    attention_dropout: str | None = None
    softmax_dtype: str = "float32"
    stored_prefix: str = ""
    unstored: tuple[str, ...] = field(default=())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Each array's shape, the layers along the first axis."""
        return {
            name: (self.depth, *weight.shape) if is_stacked(name) else weight.shape
            for name, weight in self.weights.items()
        }

    def canonical(self, name: str) -> list[str]:
        """The names of an array's weights in a checkpoint: one, or one for each layer."""
        return [name.replace(LAYER, str(number), 1) for number in range(self.depth)] if is_stacked(name) else [name]

    def canonical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Each weight's shape by its name in a checkpoint."""
        return {full: weight.shape for name, weight in self.weights.items() for full in self.canonical(name)}

    def unstacked(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays by their weights' names in a checkpoint, each layer apart."""
        return {full: np.array(part) for name, array in arrays.items()
                for full, part in zip(self.canonical(name), array if is_stacked(name) else [array], strict=True)}

    def stacked(self, weights: dict[str, Array]) -> dict[str, Array]:
        """The inverse of `unstacked`, of all weights. It empties `weights`, so that each is held about once."""
        return {name: np.stack([weights.pop(full) for full in self.canonical(name)]) if is_stacked(name)
                else weights.pop(name) for name in self.weights}

    @property
    def parameter_count(self) -> int:
        """Number of parameters, shared ones once."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def draw(self, key: jax.Array, dtype: Any) -> Params:
        """Initial weights. Each array has a random stream of its own, from its name."""
        shapes = self.shapes()
        return {
            name: weight.draw(jax.random.fold_in(key, crc32(name.encode()) & 0x7FFFFFFF), shapes[name], jnp.float32)
            .astype(dtype)
            for name, weight in self.weights.items()
        }  # fmt: skip


def is_stacked(name: str) -> bool:
    """Whether the array of that name holds every layer's."""
    return LAYER in name


def rank(name: str, array: Any) -> int:
    """Axes of one layer's part of an array."""
    return int(array.ndim) - is_stacked(name)


def layers_of(params: Params) -> Params:
    """The stacked arrays, by their names inside a layer."""
    return {name.split(f"{LAYER}.", 1)[1]: array for name, array in params.items() if is_stacked(name)}


def norm_weights(name: str, width: int) -> dict[str, Weight]:
    """A layer normalization's weight and bias."""
    return {f"{name}.weight": Weight((width,), ones), f"{name}.bias": Weight((width,), zeros)}


def lecun_normal(fan_in: int) -> Initializer:
    """A normal distribution cut off at two of its deviations, of variance 1 / `fan_in`."""
    draw: Initializer = jax.nn.initializers.truncated_normal(fan_in**-0.5 / TRUNCATED_STD)
    return draw


def normal(std: float) -> Initializer:
    """A normal distribution around 0."""
    draw: Initializer = jax.nn.initializers.normal(std)
    return draw


zeros: Initializer = jax.nn.initializers.zeros
ones: Initializer = jax.nn.initializers.ones

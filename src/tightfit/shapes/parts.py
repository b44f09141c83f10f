"""What a shape is put together from: weights by what is done with them, and stacks of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Weights:
    """Parameters held, parameters that one token uses, and weights that it is multiplied by."""

    total: int = 0
    active: int = 0
    products: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.total + other.total, self.active + other.active, self.products + other.products)

    def __mul__(self, times: int) -> Weights:
        return Weights(self.total * times, self.active * times, self.products * times)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Layers of one kind, one after another.

    products: weights that each of its positions multiplies, over all layers and what leads into them.
    width: query heads times the width of a head: what scores and mixing multiply for each pair of positions.
    cache_width: key and value heads times the width of a head.
    windows: for each layer how many positions back a token sees, itself included; None sees all.
    positions: how many there are in a sample, where the configuration fixes it.
    source_products: cross-attention's weights that each position of the encoder multiplies.
    stem: weights multiplied by the raw input, which needs no gradient, and at how many positions of a sample.
    relative: kinds of scores against relative positions (DeBERTa), how many positions, and whether no more than
        twice the sequence's length of them are used.
    """

    layers: int
    products: int
    width: int
    cache_width: int
    causal: bool = False
    windows: tuple[int | None, ...] = ()
    positions: int | None = None
    source_products: int = 0
    stem: tuple[int, int] = (0, 0)
    relative: tuple[int, int, bool] = (0, 0, False)


@dataclass(frozen=True, kw_only=True)
class Body:
    """A model without its head: its stacks, the encoder first, and every weight of theirs.

    `features` is the width that the head reads, `embedding` that of the word embedding, tied to the head or not.
    """

    stacks: tuple[Stack, ...]
    weights: Weights
    features: int
    embedding: int
    head: str = "lm"
    """What becomes of the last hidden state: `lm`, `lm-bias`, `masked` (BERT's kind), `image`."""


def linear(inputs: int, outputs: int, bias: bool = False) -> Weights:
    count = inputs * outputs + (outputs if bias else 0)
    return Weights(count, count, inputs * outputs)


def plain(count: int) -> Weights:
    """Parameters that nothing is multiplied by as a matrix: embeddings, norms, biases."""
    return Weights(count, count)


def first(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these attributes that the configuration has and that is not None."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def attention(width: int, heads: int, kv_heads: int, head: int, qkv_bias: bool, out_bias: bool) -> Weights:
    return linear(width, (heads + 2 * kv_heads) * head, qkv_bias) + linear(heads * head, width, out_bias)


def feed_forward(width: int, inner: int, gated: bool, bias: bool) -> Weights:
    return linear(width, inner * (2 if gated else 1), bias) + linear(inner, width, bias)

"""The keys and values that transformers keeps while it generates: where they lie, and longer ones of no values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.cache_utils import Cache


def cached_tensors(cache: Any) -> Iterator[Tensor]:
    """Everything that a cache keeps."""
    for part in _parts(cache):
        for layer in part.layers:
            yield from (value for value in vars(layer).values() if isinstance(value, Tensor))


def grows(cache: Any) -> bool:
    """Whether a cache keeps keys and values, which grow with every token; a state space's memory does not."""
    return any(_keeps(layer) for part in _parts(cache)[:1] for layer in part.layers)


def lengthen(cache: Any, tokens: int) -> None:
    """Put `tokens` more tokens of no values into a cache, the last one by itself, as generation puts it there: what a
    sliding window keeps lies in the memory of the last concatenation."""
    for part in _parts(cache)[:1]:  # the keys and values of an encoder's output stay what they are
        for number, layer in enumerate(part.layers):
            for count in (tokens - 1, 1) if _keeps(layer) else ():
                if tokens and count:
                    part.update(_like(layer.keys, count), _like(layer.values, count), number)


def _parts(cache: Any) -> list[Cache]:
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache] if isinstance(cache, Cache) else []


def _keeps(layer: Any) -> bool:
    return isinstance(getattr(layer, "keys", None), Tensor)


def _like(kept: Tensor, tokens: int) -> Tensor:
    """Keys or values of so many tokens: (B, heads, tokens, D)."""
    return torch.empty((*kept.shape[:2], tokens, kept.shape[3]), dtype=kept.dtype, device=kept.device)

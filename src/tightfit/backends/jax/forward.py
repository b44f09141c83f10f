"""A build's forward pass: token ids to logits, with layers laid out and recomputed as the techniques chose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from tightfit.backends.jax.attention import allowed_positions
from tightfit.backends.jax.build import Block, Build
from tightfit.backends.jax.network import Forward, Params, Part, layers_of

LAYERS = 1
"""The place in the model of the layers' random numbers; 0 is the embedding's."""


def logits(build: Build, params: Params, batch: dict[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
    """Logits of a micro-batch: (B, T, outputs), at least fp32.

    batch: `input_ids` (B, T), and `position_ids`, `document_ids`, `padding` (B, T) where there are any.
    key: of dropout; None drops nothing.
    """
    network, ids = build.network, batch["input_ids"]
    assert build.attend is not None
    positions = batch.get("position_ids")
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    forward = Forward(
        dtype=build.compute_dtype, attend=build.attend, allowed=allowed_positions(batch), positions=positions, key=key
    )
    with jax.default_matmul_precision(build.matmul_precision):
        with jax.named_scope("embed"):
            x = network.embed(params, ids, forward)
        with jax.named_scope("layers"):
            x = through_layers(build, layers_of(params), x, forward)
        with jax.named_scope("head"):
            found = network.head(params, x, forward)
            return found.astype(jnp.promote_types(found.dtype, jnp.float32))


def through_layers(build: Build, stacked: Params, x: jax.Array, forward: Forward) -> jax.Array:
    """The residual stream (B, T, width) behind the last layer."""
    assert build.stack is not None
    depth, again = build.network.depth, build.recomputation
    layers = (stacked, jnp.arange(depth, dtype=jnp.int32))

    def blocks(keep_apart: bool) -> tuple[Block, ...]:
        plain = _block(build, forward, keep_apart)
        if not again.every:
            return (plain,)
        recomputed: Block = jax.checkpoint(plain, prevent_cse=keep_apart, policy=again.policy)
        return (recomputed, *[plain] * (min(again.every, depth) - 1))

    run = partial(build.stack, blocks)
    if not again.segments:
        return run(layers, x)
    for number in range(again.segments):
        bounds = slice(depth * number // again.segments, depth * (number + 1) // again.segments)
        x = jax.checkpoint(run)(jax.tree.map(lambda a, bounds=bounds: a[bounds], layers), x)
    return x


def _block(build: Build, forward: Forward, keep_apart: bool) -> Block:
    """One layer: each branch in turn adds to the residual stream."""
    recomputed = build.recomputation.parts

    def branch(part: Part) -> Callable[[Params, jax.Array, jax.Array | None], jax.Array]:
        def added(params: Params, x: jax.Array, key: jax.Array | None) -> jax.Array:
            return part.function(params, x, forward, key)

        return jax.checkpoint(added, prevent_cse=keep_apart) if part.name in recomputed else added

    branches = [(part.name, branch(part)) for part in build.network.parts]

    def block(x: jax.Array, layer: tuple[Params, jax.Array]) -> jax.Array:
        params, number = layer
        for place, (name, added) in enumerate(branches):
            with jax.named_scope(name):
                x = x + added(params, x, forward.keys(LAYERS, number, place))
        return x

    return block

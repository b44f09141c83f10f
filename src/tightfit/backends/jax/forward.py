"""A build's forward pass: token ids to logits, with layers laid out and recomputed as the techniques chose.

Each layer stands in the program, or one does in a loop over the stacked weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from tightfit.backends.jax.attention import attention_mask
from tightfit.backends.jax.build import Build
from tightfit.backends.jax.network import Branch, Forward, Params, layers_of
from tightfit.tasks import IGNORE
from tightfit.techniques.backend import Jax

Layers = tuple[Params, jax.Array]
"""The stacked parameters of layers, and the layers' numbers; or one layer's."""
Block = Callable[[jax.Array, Layers], jax.Array]
"""(the residual stream, one layer) -> the residual stream."""
LAYERS = 1
"""The place in the model of the layers' random numbers; 0 is the embedding's."""


def loss_sum(build: Build, params: Params, batch: Params, key: jax.Array | None = None) -> jax.Array:
    """A micro-batch's summed loss in training, fp32. key: of dropout; None drops nothing."""
    found = logits(build, params, batch, key)
    with jax.named_scope("loss"):
        return cross_entropy_sum(found, batch["labels"], build.recipe.label_smoothing_factor)


def loss_and_correct(build: Build, params: Params, batch: Params) -> tuple[jax.Array, jax.Array]:
    """A micro-batch's summed loss, fp32, with nothing dropped, and how many labels have the largest logit, int32."""
    found = logits(build, params, batch)
    return cross_entropy_sum(found, batch["labels"]), (found.argmax(-1) == batch["labels"]).sum()


def cross_entropy_sum(logits: jax.Array, labels: jax.Array, smoothing: float = 0.0) -> jax.Array:
    """Summed cross-entropy, in the logits' format.

    logits: (..., classes), at least fp32. labels: int32 (...), `IGNORE` where nothing counts. smoothing: share of
    each label that is spread over all classes. Returns a scalar.
    """
    # Picked out by comparing, for the gradient of a lookup is an array of logits more.
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    of_label = jnp.where(classes == labels[..., None], logits, 0.0).sum(-1)
    if smoothing:
        of_label = (1.0 - smoothing) * of_label + smoothing * logits.mean(-1)
    return jnp.where(labels != IGNORE, jax.nn.logsumexp(logits, axis=-1) - of_label, 0.0).sum()


def logits(build: Build, params: Params, batch: Params, key: jax.Array | None = None) -> jax.Array:
    """Logits of a micro-batch: (B, T, outputs), at least fp32.

    batch: `input_ids` (B, T), and `position_ids`, `document_ids`, `padding` (B, T) where there are any.
    key: of dropout; None drops nothing.
    """
    network, ids = build.network, batch["input_ids"]
    assert build.attention_fn is not None
    positions = batch.get("position_ids")
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    forward = Forward(
        dtype=build.compute_dtype, attention_fn=build.attention_fn, mask=attention_mask(batch), positions=positions,
        key=key,
    )  # fmt: skip
    with jax.default_matmul_precision(build.matmul_precision):
        with jax.named_scope("embed"):
            x = network.embed(params, ids, forward)
        with jax.named_scope("layers"):
            x = _apply_layers(build, layers_of(params), x, forward)
        with jax.named_scope("head"):
            found = network.head(params, x, forward)
            return found.astype(jnp.promote_types(found.dtype, jnp.float32))


def _apply_layers(build: Build, stacked: Params, x: jax.Array, forward: Forward) -> jax.Array:
    """The residual stream (B, T, width) behind the last layer."""
    depth, remat, backend = build.network.depth, build.recomputation, build.recipe.backend
    assert isinstance(backend, Jax)
    assert backend.layers != "auto", "resolve the recipe first"
    layers = (stacked, jnp.arange(depth, dtype=jnp.int32))

    def blocks(keep_apart: bool) -> tuple[Block, ...]:
        plain = _block(build, forward, keep_apart)
        if not remat.every:
            return (plain,)
        recomputed: Block = jax.checkpoint(plain, prevent_cse=keep_apart, policy=remat.policy)
        return (recomputed, *[plain] * (min(remat.every, depth) - 1))

    run = partial(_scan_layers, blocks, backend.unroll if backend.scans_layers else depth)
    if not remat.segments:
        return run(layers, x)
    for number in range(remat.segments):
        bounds = slice(depth * number // remat.segments, depth * (number + 1) // remat.segments)
        x = jax.checkpoint(run)(jax.tree.map(lambda a, bounds=bounds: a[bounds], layers), x)
    return x


def _block(build: Build, forward: Forward, keep_apart: bool) -> Block:
    """One layer: each branch in turn adds to the residual stream."""
    recomputed = build.recomputation.branches

    def applied(branch: Branch) -> Callable[[Params, jax.Array, jax.Array | None], jax.Array]:
        def apply(params: Params, x: jax.Array, key: jax.Array | None) -> jax.Array:
            return branch.function(params, x, forward, key)

        return jax.checkpoint(apply, prevent_cse=keep_apart) if branch.name in recomputed else apply

    branches = [(branch.name, applied(branch)) for branch in build.network.branches]

    def block(x: jax.Array, layer: tuple[Params, jax.Array]) -> jax.Array:
        params, number = layer
        for place, (name, apply) in enumerate(branches):
            with jax.named_scope(name):
                x = x + apply(params, x, forward.keys(LAYERS, number, place))
        return x

    return block


def _scan_layers(
    blocks: Callable[[bool], tuple[Block, ...]], unroll: int, layers: Layers, x: jax.Array
) -> jax.Array:
    """Layers in a loop, in turns of as many as there are different blocks; what is left over comes one by one.

    blocks: takes whether recomputation must be kept from being merged with what it repeats, as it is where both stand
    in one program, outside of a loop. unroll: turns in one pass of the loop; there is none for fewer turns.
    """
    depth, inside = len(layers[1]), blocks(False)
    cycle = len(inside)
    turns = depth // cycle
    if turns <= unroll:
        return _unroll_layers(blocks(True), layers, x)

    def turn(x: jax.Array, some: Layers) -> tuple[jax.Array, None]:
        return _unroll_layers(inside, some, x) if cycle > 1 else inside[0](x, some), None

    inner = turns * cycle
    looped, rest = jax.tree.map(lambda a: a[:inner], layers), jax.tree.map(lambda a: a[inner:], layers)
    if cycle > 1:
        looped = jax.tree.map(lambda a: a.reshape(turns, cycle, *a.shape[1:]), looped)
    x, _ = jax.lax.scan(turn, x, looped, unroll=unroll)
    return _unroll_layers(blocks(True), rest, x)


def _unroll_layers(blocks: tuple[Block, ...], layers: Layers, x: jax.Array) -> jax.Array:
    depth = len(layers[1])
    if not depth:
        return x
    # Split, not indexed: the gradient is then one concatenation instead of a sum of arrays that are mostly zero.
    leaves, shape = jax.tree.flatten(layers)
    parts = [jax.lax.split(leaf, (1,) * depth) for leaf in leaves]
    for number in range(depth):
        layer = jax.tree.unflatten(shape, [part[number].reshape(part[number].shape[1:]) for part in parts])
        x = blocks[number % len(blocks)](x, layer)
    return x

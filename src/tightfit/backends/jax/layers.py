"""Layouts of the layers: each stands in the program, or one does in a loop over the stacked weights."""

from __future__ import annotations

from functools import partial

import jax

from tightfit.backends.jax.build import Block, Blocks, Stack
from tightfit.backends.jax.network import Params
from tightfit.techniques.backend import Jax

Layers = tuple[Params, jax.Array]
"""The stacked parameters, and the layers' numbers."""


def layout(backend: Jax) -> Stack:
    """The layout of the layers in the program, as a resolved recipe's backend says."""
    assert backend.layers != "auto", "resolve the recipe first"
    return _unrolled if backend.layers == "unrolled" else partial(_scanned, backend.unroll)


def _unrolled(blocks: Blocks, layers: Layers, x: jax.Array) -> jax.Array:
    # Forward pass and recomputation stand in one program, where equal expressions are merged unless kept apart.
    return _one_by_one(blocks(True), layers, x)


def _scanned(unroll: int, blocks: Blocks, layers: Layers, x: jax.Array) -> jax.Array:
    """Layers in turns of as many as there are different blocks; what is left over comes one by one."""
    depth, cycle = len(layers[1]), len(blocks(False))
    turns = depth // cycle
    if turns <= unroll:  # no loop would be left
        return _unrolled(blocks, layers, x)
    inside = blocks(False)

    def turn(x: jax.Array, some: Layers) -> tuple[jax.Array, None]:
        return _one_by_one(inside, some, x) if cycle > 1 else inside[0](x, some), None

    inner = turns * cycle
    looped, rest = jax.tree.map(lambda a: a[:inner], layers), jax.tree.map(lambda a: a[inner:], layers)
    if cycle > 1:
        looped = jax.tree.map(lambda a: a.reshape(turns, cycle, *a.shape[1:]), looped)
    x, _ = jax.lax.scan(turn, x, looped, unroll=unroll)
    return _one_by_one(blocks(True), rest, x)


def _one_by_one(blocks: tuple[Block, ...], layers: Layers, x: jax.Array) -> jax.Array:
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

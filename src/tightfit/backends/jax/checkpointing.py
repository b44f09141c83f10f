"""Activation checkpointing (remat): which layers, or which of their branches, the backward pass computes again.

XLA compiles the recomputation together with the rest, so that gradients agree to rounding, not bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax

from tightfit.backends.jax.build import Build, Recomputation
from tightfit.backends.jax.network import ATTENTION
from tightfit.techniques.checkpointing import (
    AttentionOnly,
    EveryBlock,
    EveryNth,
    MlpOnly,
    Segments,
    Selective,
)


def every_block(technique: EveryBlock, build: Build) -> Build:
    if technique.apart:
        return replace(build, recomputation=Recomputation(parts=frozenset(part.name for part in build.network.parts)))
    return replace(build, recomputation=Recomputation(every=1))


def every_nth(technique: EveryNth, build: Build) -> Build:
    return replace(build, recomputation=Recomputation(every=technique.n))


def segments(technique: Segments, build: Build) -> Build:
    depth = build.network.depth
    count = round(math.sqrt(depth)) if technique.count == "auto" else min(technique.count, depth)
    return replace(build, recomputation=Recomputation(segments=count))


def mlp_only(technique: MlpOnly, build: Build) -> Build:
    return replace(build, recomputation=Recomputation(parts=frozenset({"mlp"})))


def attention_only(technique: AttentionOnly, build: Build) -> Build:
    return replace(build, recomputation=Recomputation(parts=frozenset({"attention"})))


def selective(technique: Selective, build: Build) -> Build:
    names = {
        "matmul-and-attention": [*build.network.products, ATTENTION],
        "attention": [ATTENTION],
        "every-other-matmul": [*build.network.products[::2], ATTENTION],
    }[technique.keep]
    return replace(build, recomputation=Recomputation(every=1, policy=_kept(names, technique.offload)))


def _kept(names: list[str], offload: bool) -> Any:
    if not offload:
        return jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=names,
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip

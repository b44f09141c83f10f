"""Activation checkpointing (remat): which layers, or which of their branches, the backward pass computes again.

XLA compiles the recomputation together with the rest, so that gradients agree to rounding, not bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax

from tightfit.backends.jax.build import Build, Recomputation
from tightfit.backends.jax.network import ATTENTION
from tightfit.techniques import checkpointing as declared


def checkpointing(technique: declared.Checkpointing, build: Build) -> Build:
    return replace(build, recomputation=_recomputation(technique, build))


def _recomputation(technique: declared.Checkpointing, build: Build) -> Recomputation:
    network = build.network
    match technique:
        case declared.EveryBlock(apart=True):
            return Recomputation(branches=frozenset(branch.name for branch in network.branches))
        case declared.EveryBlock():
            return Recomputation(every=1)
        case declared.EveryNth(n=n):
            return Recomputation(every=n)
        case declared.Segments(count="auto"):
            return Recomputation(segments=round(math.sqrt(network.depth)))
        case declared.Segments(count=int(count)):
            return Recomputation(segments=min(count, network.depth))
        case declared.MlpOnly() | declared.AttentionOnly():
            return Recomputation(branches=frozenset({technique.name}))
        case declared.Selective(keep=keep, offload=offload):
            products = {"matmul-and-attention": network.products, "attention": (),
                        "every-other-matmul": network.products[::2]}[keep]
            names, policies = [*products, ATTENTION], jax.checkpoint_policies
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[], names_which_can_be_offloaded=names, offload_src="device",
                offload_dst="pinned_host",
            ) if offload else policies.save_only_these_names(*names)  # fmt: skip
            return Recomputation(every=1, policy=policy)
        case _:
            return Recomputation()

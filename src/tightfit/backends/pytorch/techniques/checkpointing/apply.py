"""Activation checkpointing: which modules are recomputed together, and which ops' results are kept."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from tightfit.backends.pytorch.blocks import attention_modules, mlp_modules
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.checkpointing.recomputation import Policy, recompute
from tightfit.errors import ModelError
from tightfit.techniques.checkpointing import (
    AttentionOnly,
    EveryBlock,
    EveryNth,
    MemoryBudget,
    MlpOnly,
    Segments,
    Selective,
    TiledMlp,
)

MATMULS = frozenset(f"aten::{name}" for name in (
    "mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm",
))  # fmt: skip
"""Matrix products, as the dispatcher names them."""

ATTENTION = re.compile(r"::_(scaled_dot_product_\w+|(flash|efficient)_attention_forward|varlen_attn"
                       r"|flash_attn(_varlen)?_forward)$|^flex_attention$")
"""Fused attention's forward passes, as the dispatcher names them."""


def every_block(technique: EveryBlock, build: Build) -> Build:
    if technique.apart:
        return attention_only(AttentionOnly(), mlp_only(MlpOnly(), build))
    return every_nth(EveryNth(n=1), build)


def every_nth(technique: EveryNth, build: Build) -> Build:
    # The first of each n: the last blocks are then free by the time the first recomputation needs room.
    recompute(build.model, [[block] for stack in _stacks(build) for block in stack[:: technique.n]])
    return build


def selective(technique: Selective, build: Build) -> Build:
    recompute(build.model, [[block] for stack in _stacks(build) for block in stack], POLICIES[technique.keep])
    return build


def segments(technique: Segments, build: Build) -> Build:
    chains = []
    for stack in _stacks(build):
        count = round(math.sqrt(len(stack))) if technique.count == "auto" else min(technique.count, len(stack))
        chains += list(equal_runs(stack, count))
    recompute(build.model, chains)
    return build


def tiled_mlp(technique: TiledMlp, build: Build) -> Build:
    # Only whoever asks for it reads of experts.
    from tightfit.backends.pytorch.techniques.checkpointing.tiled_mlp import (
        feed_forward_takes_tiles,
        norm_takes_tiles,
        tile,
    )

    blocks = [block for stack in _stacks(build) for block in stack]
    parts = [mlp_modules(block) for block in blocks]
    tiled = [chain[0] for chain in parts if feed_forward_takes_tiles(chain)]
    norms = [module for block in blocks for module in block.children() if norm_takes_tiles(module)]
    if build.recipe.compiled:  # one kernel each, which keeps the input alone
        norms = []
    for module in dict.fromkeys([*tiled, *norms]):
        tile(module, technique.tokens)
    build = every_block(EveryBlock(), build)
    if len(tiled) == len(parts):
        return build
    note = (f"checkpointing: the feed-forward parts of {len(parts) - len(tiled)} of {len(parts)} blocks are recomputed "
            "whole, for they send tokens to experts, are code of your own, or are no one module that treats each token "
            "alone")
    return replace(build, notes=(*build.notes, note))


def mlp_only(technique: MlpOnly, build: Build) -> Build:
    return _parts(build, mlp_modules, "feed-forward part")


def attention_only(technique: AttentionOnly, build: Build) -> Build:
    return _parts(build, attention_modules, "attention part")


def memory_budget(technique: MemoryBudget, build: Build) -> Build:
    # The compiler takes seconds to import.
    from tightfit.backends.pytorch.techniques.checkpointing.memory_budget import memory_budget as budget_setting

    return replace(build, settings=(*build.settings, partial(budget_setting, technique.budget)))


def equal_runs(stack: Sequence[nn.Module], count: int) -> Iterator[Sequence[nn.Module]]:
    """`stack` in `count` runs whose lengths differ by one at most, in order."""
    bounds = [len(stack) * i // count for i in range(count + 1)]
    return (stack[start:stop] for start, stop in itertools.pairwise(bounds))


def _stacks(build: Build) -> Sequence[Sequence[nn.Module]]:
    """The stacks with each block once: a block that is called again is the same region again."""
    if not build.stacks:
        raise ModelError(f"{type(build.model).__name__} has no repeated blocks to recompute; write checkpointing=none")
    return [tuple(dict.fromkeys(stack)) for stack in build.stacks]


def _parts(build: Build, find: Callable[[nn.Module], Sequence[nn.Module]], part: str) -> Build:
    chains = []
    for stack in _stacks(build):
        for block in stack:
            chain = find(block)
            if not chain:
                raise ModelError(
                    f"the {part} of {type(block).__name__} is no chain of modules that could be recomputed alone; "
                    "write checkpointing=every-block or checkpointing=selective"
                )
            chains.append(chain)
    recompute(build.model, chains)
    return build


def _keep_every_other_matmul() -> Policy:
    """A policy with counts of its own, one of the forward pass and one of the recomputation."""
    seen: Counter[bool] = Counter()

    def keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op.name() in MATMULS:
            seen[context.is_recompute] += 1
            return _verdict(seen[context.is_recompute] % 2 == 1)
        return _keep_attention(context, op, *args, **kwargs)

    return keep


def _keep_matmul_or_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _verdict(op.name() in MATMULS or _is_repeatable_attention(op, args, kwargs))


def _keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _verdict(_is_repeatable_attention(op, args, kwargs))


def _verdict(keep: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _is_repeatable_attention(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Fused attention that draws no random numbers: one that does, left out of the recomputation, would shift the
    numbers that every later dropout draws."""
    if not ATTENTION.search(op.name()):
        return False
    names = [argument.name for argument in op._schema.arguments] if hasattr(op, "_schema") else []
    return not {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p")


POLICIES: dict[str, Callable[[], Policy]] = {
    "matmul-and-attention": lambda: _keep_matmul_or_attention,
    "attention": lambda: _keep_attention,
    "every-other-matmul": _keep_every_other_matmul,
}
"""Makers of the selective policies, by the technique's `keep`."""

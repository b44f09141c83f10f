"""Fewer of a model's alike blocks, so that two shallow traces stand for a deep one: see `tightfit.trace.extension`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import nn

from tightfit.backends.pytorch.blocks import find_stacks
from tightfit.backends.pytorch.build import Build
from tightfit.recipe import Recipe

BLOCK_NUMBER_NAMES = ("idx", "index", "layer_id", "layer_number")
"""Names of a module's own number in the stack, in which alike blocks differ."""


@dataclass(frozen=True)
class Repeated:
    """A stack whose blocks repeat every `period`, in a container of the model.

    path: the container's name. head: blocks in front of the first group, such as T5's, which holds the positions'
        biases. stop: the number of the first block that is unlike the groups, such as one that stays on the device
        while they wait in host memory.
    """

    path: str
    container: nn.ModuleList
    head: int
    period: int
    stop: int

    @property
    def groups(self) -> int:
        return (self.stop - self.head) // self.period

    @property
    def behind(self) -> int:
        """Blocks behind the last whole group."""
        return len(self.container) - self.head - self.groups * self.period

    @property
    def unlike(self) -> int:
        """Blocks in front of the groups and behind `stop`, in groups: both of two shallow traces take them as well."""
        return (self.head + len(self.container) - self.stop) // self.period

    def keep(self, groups: int) -> list[int]:
        """Leave the head, the first `groups` groups and what is behind the last one, in place. The numbers kept."""
        blocks = list(self.container)
        kept = [*range(self.head + groups * self.period), *range(len(blocks) - self.behind, len(blocks))]
        del self.container[:]
        self.container.extend(blocks[number] for number in kept)
        return kept


@dataclass
class Shorten:
    """Shortens a build's stacks to `keep` groups each, where they have `least` or more.

    of_several: groups that are kept beyond those where there are several stacks; `keep` then counts them as well.
    stacks: those shortened; empty where the model was left whole. groups: how many each had.
    """

    keep: int
    least: int
    of_several: int = 0
    stacks: list[Repeated] = field(default_factory=list)
    groups: int = 0

    def __call__(self, build: Build) -> Build:
        found, recipe = repeated_stacks(build.model, build.stacks, build.recipe), build.recipe
        if found and found[0].groups >= self.least + found[0].unlike:
            self.stacks, self.groups = found, found[0].groups
            blocks = len(found[0].container)
            self.keep += self.of_several * (len(found) > 1)
            kept = [stack.keep(self.keep) for stack in found]
            recipe = _with_shares_of(recipe, blocks, kept[0])
        return replace(build, recipe=recipe, stacks=find_stacks(build.model))


def _partial_shares(recipe: Recipe) -> dict[str, float]:
    """The shares of the blocks that wait in host memory, of kinds of memory of which others stay."""
    shares = {kind: share for kind, share in vars(recipe.offloaded).items() if not isinstance(share, bool)}
    return {kind: share for kind, share in shares.items() if 0 < share < 1}


def _with_shares_of(recipe: Recipe, blocks: int, kept: Sequence[int]) -> Recipe:
    """The recipe for those kept of so many blocks, each with what it had in host memory."""
    partial = _partial_shares(recipe)
    if recipe.offload == "auto" or not partial:
        return recipe
    counts = {kind: sum(number < round(share * blocks) for number in kept) for kind, share in partial.items()}
    # Not all even where the count is: optimizer=1 is more than the states of all blocks.
    shares = {kind: max(count - 0.25, 0.25) / len(kept) for kind, count in counts.items()}
    return recipe.model_copy(update={"offload": recipe.offload.with_shares(shares)})


def repeated_stacks(model: nn.Module, stacks: Iterable[Sequence[nn.Module]], recipe: Recipe) -> list[Repeated]:
    """The model's stacks, where each repeats and all are equally deep; none where they are not.

    Where a technique treats blocks by their number, a group is as long as its pattern; where a share of the blocks
    waits in host memory, groups are of the longer part.
    """
    every = 1 if recipe.checkpointing == "auto" else recipe.checkpointing.period
    partial = _partial_shares(recipe)
    if every is None or (partial and len([*stacks]) > 1):
        return []
    found = []
    for stack in stacks:
        place = _container(model, stack)
        if place is None:
            return []
        signatures = [_signature(block) for block in stack]
        ends = sorted({0, len(stack), *(round(share * len(stack)) for share in partial.values())})
        start, stop = max(pairwise(ends), key=lambda part: part[1] - part[0])
        start = -(-start // every) * every  # a technique with a pattern over blocks counts from the first one
        head, period = min(((head, _period(signatures[head:stop])) for head in (start, start + (every == 1))),
                           key=lambda pair: (pair[1], pair[0]))
        found.append(Repeated(*place, head, math.lcm(period, every), stop))
    alike = {stack.groups for stack in found}
    return found if len(alike) == 1 else []


def _container(model: nn.Module, stack: Sequence[nn.Module]) -> tuple[str, nn.ModuleList] | None:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(stack) \
                and all(a is b for a, b in zip(module, stack, strict=True)):
            return name, module
    return None


def _signature(block: nn.Module) -> tuple[object, ...]:
    """Properties that decide a block's work: classes, shapes, and settings that are no number of its own."""
    parts: list[object] = []
    for name, module in block.named_modules():
        parts.append((name, type(module)))
        parts += [(key, tuple(p.shape), p.dtype) for key, p in module.named_parameters(recurse=False)]
        parts += [
            (key, value) for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | str | None) and not key.startswith("_")
            and not any(word in key for word in BLOCK_NUMBER_NAMES)
        ]
        parts += [(key, value > 0) for key, value in sorted(vars(module).items()) if isinstance(value, float)]
    return tuple(parts)


def _period(signatures: Sequence[object]) -> int:
    """The least number of blocks after which all is the same again."""
    count = len(signatures)
    return next(
        (p for p in range(1, count + 1) if all(signatures[i] == signatures[i + p] for i in range(count - p))), 1
    )

"""Fewer of a model's alike blocks, so that two shallow traces stand for a deep one: see `tightfit.trace.extension`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from tightfit.backends.pytorch.blocks import find_stacks
from tightfit.backends.pytorch.build import Build
from tightfit.recipe import Recipe

NUMBERED = ("idx", "index", "layer_id", "layer_number")
"""Names of a module's own number in the stack, in which alike blocks differ."""


@dataclass(frozen=True)
class Repeated:
    """A stack whose blocks repeat every `period`, in a container of the model.

    path: the container's name. head: blocks in front of the first group, such as T5's, which holds the positions'
        biases. rest: blocks behind the last whole group.
    """

    path: str
    container: nn.ModuleList
    head: int
    period: int

    @property
    def groups(self) -> int:
        return (len(self.container) - self.head) // self.period

    @property
    def rest(self) -> int:
        return (len(self.container) - self.head) % self.period

    def keep(self, groups: int) -> None:
        """Leave the head, the first `groups` groups and the rest, in place."""
        blocks = list(self.container)
        kept = blocks[: self.head + groups * self.period] + blocks[len(blocks) - self.rest :]
        del self.container[:]
        self.container.extend(kept)


@dataclass
class Shorten:
    """Shortens a build's stacks to `keep` groups each, where they have `least` or more.

    stacks: those shortened; empty where the model was left whole. groups: how many each had.
    """

    keep: int
    least: int
    stacks: list[Repeated] = field(default_factory=list)
    groups: int = 0

    def __call__(self, build: Build) -> Build:
        found = repeated_stacks(build.model, build.stacks, build.recipe)
        if found and found[0].groups >= self.least:
            self.stacks, self.groups = found, found[0].groups
            for stack in found:
                stack.keep(self.keep)
        return replace(build, stacks=find_stacks(build.model))


def repeated_stacks(model: nn.Module, stacks: Iterable[Sequence[nn.Module]], recipe: Recipe) -> list[Repeated]:
    """The model's stacks, where each repeats and all are equally deep; none where they are not.

    Where a technique treats blocks by their number, a group is as long as its pattern.
    """
    every = 1 if recipe.checkpointing == "auto" else recipe.checkpointing.period
    if every is None:
        return []
    found = []
    for stack in stacks:
        place = _container(model, stack)
        if place is None:
            return []
        signatures = [_signature(block) for block in stack]
        # A technique with a pattern over blocks counts from the first one.
        head, period = min(((head, _period(signatures[head:])) for head in ((0, 1) if every == 1 else (0,))),
                           key=lambda pair: (pair[1], pair[0]))
        found.append(Repeated(*place, head, math.lcm(period, every)))
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
            and not any(word in key for word in NUMBERED)
        ]
        parts += [(key, value > 0) for key, value in sorted(vars(module).items()) if isinstance(value, float)]
    return tuple(parts)


def _period(signatures: Sequence[object]) -> int:
    """The least number of blocks after which all is the same again."""
    count = len(signatures)
    return next(
        (p for p in range(1, count + 1) if all(signatures[i] == signatures[i + p] for i in range(count - p))), 1
    )

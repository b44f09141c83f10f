"""Schedule of one compiled graph: the kernels it launches, the memory it holds meanwhile, and its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._pytree import tree_map

from tightfit.backends.pytorch.follow.op_costs import cost
from tightfit.backends.pytorch.follow.tracker import Scratch
from tightfit.trace import Op, Phase


def no_scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Memory that the graph allocates, alive in the steps from `born` to `dies`, both included.

    dies: None for an output's.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    born: int
    dies: int | None

    @property
    def bytes(self) -> int:
        if 0 in self.size:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.size, self.stride, strict=True))
        return (1 + last) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Output:
    """One output of a graph.

    kind: `input`, a tensor on the storage of the argument at `index`; `storage`, one on `Schedule.storages[index]`;
        `value`, the number `value`; `none`.
    size, stride, offset, dtype: of the tensor.
    """

    kind: Literal["input", "storage", "value", "none"]
    index: int = 0
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A compiled graph, in steps. A step may launch several kernels, or none where it only names memory.

    kernels: as ops, whose tick, phase and module are for whoever traces to fill in.
    passing: what a library's kernel takes and gives back inside a step: the step, and bytes.
    last_uses: for each argument, the last step that reads it; -1 where none does.
    sure: how sure all this is, as a sentence.
    """

    kernels: tuple[Op, ...]
    steps: int
    storages: tuple[Storage, ...]
    last_uses: tuple[int, ...]
    outputs: tuple[Output, ...]
    sure: str
    passing: tuple[tuple[int, int], ...] = ()

    def peak(self, freed: Sequence[tuple[int, int]]) -> int:
        """The most bytes alive at once, of what the graph allocates and of the arguments that die in it.

        freed: of each of those arguments' storages, its bytes and the last step that reads it.
        """
        change = [0] * (self.steps + 2)
        for storage in self.storages:
            change[storage.born] += storage.bytes
            if storage.dies is not None:
                change[storage.dies + 1] -= storage.bytes
        live = most = sum(size for size, _ in freed)
        for size, last in freed:
            change[last + 1] -= size
        passing = dict(self.passing)
        for step, delta in enumerate(change):
            live += delta
            most = max(most, live + passing.get(step, 0))
        return most

    @property
    def kept(self) -> int:
        """The bytes that the graph allocates and gives back."""
        return sum(storage.bytes for storage in self.storages if storage.dies is None)


def called(node: fx.Node, scratch: Scratch) -> tuple[Op, int]:
    """A library's kernel that a graph's node calls, and the memory that it takes while it runs."""
    args, kwargs, result = tree_map(
        lambda value: value.meta.get("val") if isinstance(value, fx.Node) else value, (node.args, node.kwargs, node)
    )
    func: Any = node.target
    inner = next((at for at, value in enumerate(args) if isinstance(value, OpOverload)), None)
    if isinstance(func, HigherOrderOperator) and inner is not None:  # an op that is run with a state of its own
        func, args = args[inner], args[inner + 1 :]
        kwargs = {name: value for name, value in kwargs.items() if name != "rng_state"}
    op = Op(name=str(func), tick=0, phase=Phase.FORWARD, **cost(func, args, kwargs, result)._asdict())
    return op, scratch(func, args, kwargs, result)

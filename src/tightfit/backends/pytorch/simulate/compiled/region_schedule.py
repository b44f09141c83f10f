"""Schedule of one compiled graph: the kernels it launches, the memory it holds meanwhile, and its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._pytree import tree_map

from tightfit.backends.pytorch.follow.op_costs import cost
from tightfit.backends.pytorch.follow.tracker import Scratch
from tightfit.trace import Op, Phase


@dataclass(kw_only=True, eq=False)
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

    def allocate(self) -> Tensor:
        """A tensor on such memory."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, kw_only=True)
class Output:
    """One output of a graph.

    kind: `input`, a tensor on the storage of the argument at `index`; `storage`, one on `Schedule.storages[index]`;
        `value`, the number `value`, or None.
    size, stride, offset, dtype: of the tensor.
    """

    kind: Literal["input", "storage", "value"]
    index: int = 0
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    value: Any = None


class Kernel(NamedTuple):
    """A kernel that is launched in a step. op: its tick, phase and module are for whoever traces to fill in. scratch:
    bytes that a library's kernel takes and gives back as it runs."""

    step: int
    op: Op
    scratch: int


class Step(NamedTuple):
    """A step of a graph: storages that are allocated before its kernels, and those that are freed behind them, by their
    place in `Schedule.storages`."""

    born: list[int]
    kernels: list[Kernel]
    dying: list[int]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A compiled graph, in steps. A step may launch several kernels, or none where it only names memory.

    last_uses: for each argument, the last step that reads it; -1 where none does.
    sure: how sure all this is, as a sentence.
    """

    kernels: tuple[Kernel, ...]
    steps: int
    storages: tuple[Storage, ...]
    last_uses: tuple[int, ...]
    outputs: tuple[Output, ...]
    sure: str

    @cached_property
    def by_step(self) -> Sequence[Step]:
        """The steps in order, and one more for what is allocated behind the last."""
        found = [Step([], [], []) for _ in range(self.steps + 1)]
        for index, storage in enumerate(self.storages):
            found[storage.born].born.append(index)
            if storage.dies is not None:
                found[storage.dies].dying.append(index)
        for kernel in self.kernels:
            found[kernel.step].kernels.append(kernel)
        return found


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

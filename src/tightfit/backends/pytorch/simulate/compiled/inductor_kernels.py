"""The kernels of a graph that Inductor has lowered and fused. Private to torch, as all of `inductor_schedule` is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor import dependencies, ir
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode, SchedulerNode

from tightfit.backends.pytorch.follow.op_classes import class_of
from tightfit.backends.pytorch.simulate.compiled.region_schedule import (
    Kernel,
    Scratch,
    Symbols,
    called,
    number,
    numbers,
)
from tightfit.trace import OpClass


@dataclass(frozen=True)
class Buffer:
    """What a tensor's memory is made of, in sizes that may be dynamic."""

    size: Sequence[Any]
    stride: Sequence[Any]
    dtype: torch.dtype
    device: torch.device


@dataclass
class Traffic:
    """Elements of a buffer that a kernel touches: so many, and no more than the buffer has."""

    buffer: Buffer
    touched: Any = 0

    def bytes(self, symbols: Symbols) -> int:
        whole = math.prod(numbers(self.buffer.size, symbols))
        return min(number(self.touched, symbols), whole) * self.buffer.dtype.itemsize


@dataclass(frozen=True)
class Generated:
    """A kernel that Inductor writes."""

    name: str
    op_class: OpClass
    reads: Sequence[Traffic]
    writes: Sequence[Traffic]

    def sized(self, symbols: Symbols, scratch: Scratch) -> tuple[Kernel, int]:
        kernel = Kernel(
            name=self.name, op_class=self.op_class,
            bytes_read=sum(traffic.bytes(symbols) for traffic in self.reads),
            bytes_written=sum(traffic.bytes(symbols) for traffic in self.writes),
            dtype=str(self.writes[0].buffer.dtype).removeprefix("torch.") if self.writes else "",
            shapes=tuple(numbers(traffic.buffer.size, symbols) for traffic in self.writes),
        )
        return kernel, 0


@dataclass(frozen=True)
class Called:
    """A kernel of a library."""

    node: fx.Node

    def sized(self, symbols: Symbols, scratch: Scratch) -> tuple[Kernel, int]:
        return called(self.node, symbols, scratch)


def buffer_of(layout: Any) -> Buffer:
    return Buffer(layout.size, layout.stride, layout.dtype, layout.device)


def is_generated(node: BaseSchedulerNode) -> bool:
    return all(isinstance(part, SchedulerNode) for part in node.get_nodes())


def read_kernel(graph: Any, node: BaseSchedulerNode) -> Generated | Called | None:
    """The kernel that a node of the schedule launches; None where it launches none."""
    if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
        return None
    origins = [o for part in node.get_nodes() if part.node is not None for o in part.node.get_origins()]
    if node.is_extern() and node.node is not None:
        target = getattr(node.node, "op_overload", None)
        for origin in (node.node.get_origin_node(), *(o for o in origins if o.target is target)):
            if origin is not None and origin.op == "call_function":
                return Called(origin)
    targets = dict.fromkeys(o.target for o in sorted(origins) if isinstance(o.target, torch._ops.OpOverload))
    names = list(dict.fromkeys(target.overloadpacket.__name__ for target in targets if not target.is_view))
    moves = names and all(class_of(name, None) is OpClass.MOVEMENT for name in names)
    op_class = OpClass.MOVEMENT if moves else OpClass.ELEMENTWISE
    reads, writes = _traffic(graph, node)
    return Generated(
        " ".join(("fused", *names)), OpClass.NORMALIZATION if node.is_reduction() else op_class, reads, writes
    )


def _traffic(graph: Any, node: BaseSchedulerNode) -> tuple[list[Traffic], list[Traffic]]:
    """What a generated kernel reads and writes: each buffer once, and no more of it than its loops touch."""
    found: tuple[dict[str, Traffic], dict[str, Traffic]] = ({}, {})
    for part in node.get_nodes():
        loops = part.get_ranges() if isinstance(part, SchedulerNode) else None
        for kind, deps in zip(found, (part.read_writes.reads, part.read_writes.writes), strict=True):
            for dep in deps:
                buffer = _find(graph, dep.name)
                if buffer is None or isinstance(dep, dependencies.WeakDep) or dep.name in graph.removed_buffers:
                    continue
                touched = math.prod([size for group in loops or (buffer.size,) for size in group])
                kind.setdefault(dep.name, Traffic(buffer)).touched += touched
    return [*found[0].values()], [*found[1].values()]


def _find(graph: Any, name: str) -> Buffer | None:
    value = graph.name_to_buffer.get(name, graph.graph_inputs.get(name))
    layout = value.get_output_spec() if isinstance(value, ir.IRNode) else None
    return buffer_of(layout) if isinstance(layout, ir.Layout) else None

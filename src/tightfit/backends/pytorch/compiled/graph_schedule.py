"""A graph's schedule from the graph alone: what there is where Inductor's cannot be read.

Every result lives from the op that makes it to the last that reads it. An element-wise op whose only reader is another
op that a compiler writes code for is fused into that one, and its result is never in memory. Nothing is reordered,
written in place, or split.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_leaves

from tightfit.backends.pytorch.compiled.region_schedule import (
    Kernel,
    Output,
    Schedule,
    Scheduler,
    Scratch,
    Storage,
    Symbols,
    called,
    no_scratch,
    number,
    numbers,
)
from tightfit.backends.pytorch.tracing.op_classes import class_of
from tightfit.trace import OpClass

GENERATED = (OpClass.ELEMENTWISE, OpClass.NORMALIZATION, OpClass.MOVEMENT)
"""Classes of ops that a compiler writes code for; for the others it calls a library."""

CASTS = frozenset({"convert_element_type", "_to_copy", "clone"})
"""Element-wise ops that torch does not tag as such."""


def copy_graph(module: fx.GraphModule) -> fx.Graph:
    """The graph as it is now, whatever passes do to the module; its example values are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return graph


def graph_schedule(
    module: fx.GraphModule, graph: fx.Graph, inputs: Sequence[Any], reason: str, scratch: Scratch = no_scratch
) -> Scheduler:
    """Schedule a graph of AOTAutograd's in its own order.

    module: what the graph's attributes are looked up in. inputs: its example values. reason: why it was not Inductor
    that did this.
    """
    mode = detect_fake_mode(inputs)
    FakeTensorProp(fx.GraphModule(module, graph), mode).propagate_dont_convert_inputs(*inputs)
    return _Sized(_Groups(graph), reason, scratch)


@dataclass
class _Groups:
    """A graph's ops, in the groups that run as one kernel.

    nodes: the ops that compute, in order. homes: the storage that each of a node's tensors lies in, by its example's
    storage. leaders: the op that a fused one runs with.
    """

    graph: fx.Graph
    nodes: list[fx.Node] = field(default_factory=list)
    leaders: dict[fx.Node, fx.Node] = field(default_factory=dict)
    reads: dict[fx.Node, set[int]] = field(default_factory=dict)
    makes: dict[fx.Node, dict[int, Any]] = field(default_factory=dict)
    inputs: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known: set[int] = set()
        for index, node in enumerate(self.graph.find_nodes(op="placeholder")):
            for tensor in _tensors(node):
                known.add(_home(tensor))
                self.inputs.setdefault(_home(tensor), []).append(index)
        readers: dict[int, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op != "call_function" or node.target is operator.getitem:
                continue
            self.makes[node] = {_home(t): t for t in _tensors(node) if _home(t) not in known}
            known |= self.makes[node].keys()
            if not self.makes[node] and not _writes(node):
                continue  # a view
            self.nodes.append(node)
            self.reads[node] = {_home(t) for arg in node.all_input_nodes for t in _tensors(arg)}
            for home in self.reads[node]:
                readers.setdefault(home, []).append(node)
        self.returned = {_home(t) for node in self.graph.output_node().all_input_nodes for t in _tensors(node)}
        for node in reversed(self.nodes):
            users = [user for home in self.makes[node] for user in readers.get(home, ())]
            fused = (
                _is_elementwise(node) and not self.returned & self.makes[node].keys()
                and len(users) == 1 and _class(users[0]) in GENERATED
            )
            self.leaders[node] = self.leaders[users[0]] if fused else node


def _is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _name(node) in CASTS


def _class(node: fx.Node) -> OpClass:
    return OpClass.ELEMENTWISE if _is_elementwise(node) else class_of(_name(node), node.target)


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    return (value for value in tree_leaves(_example(node)) if isinstance(value, Tensor))


def _example(node: fx.Node) -> Any:
    """The node's example value; an op's results keep theirs when they are taken apart."""
    if node.target is operator.getitem:
        whole, index = node.args
        assert isinstance(whole, fx.Node)
        return _example(whole)[index]
    return node.meta.get("val")


def _home(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True)
class _Sized:
    """A schedule whose sizes wait for a call."""

    groups: _Groups
    reason: str
    scratch: Scratch

    def __call__(self, symbols: Symbols) -> Schedule:
        groups = self.groups
        leaders = [node for node in groups.nodes if groups.leaders[node] is node]
        steps = {leader: step for step, leader in enumerate(leaders)}
        members: dict[fx.Node, list[fx.Node]] = {leader: [] for leader in leaders}
        last: dict[int, int] = {}
        for node in groups.nodes:
            leader = groups.leaders[node]
            members[leader].append(node)
            for home in groups.reads[node]:
                last[home] = max(last.get(home, -1), steps[leader])
        storages = {
            home: Storage(
                size=numbers(tensor.shape, symbols), stride=numbers(tensor.stride(), symbols), dtype=tensor.dtype,
                device=tensor.device, born=steps[leader],
                dies=None if home in groups.returned else max(last.get(home, -1), steps[leader]),
            )
            for leader in leaders for home, tensor in groups.makes[leader].items()
        }
        count = len(groups.graph.find_nodes(op="placeholder"))
        uses = {index: last.get(home, -1) for home, indices in groups.inputs.items() for index in indices}
        returned = groups.graph.output_node().args[0]
        assert isinstance(returned, Sequence)
        kernels = [self._kernel(leader, members[leader], symbols) for leader in leaders]
        return Schedule(
            kernels=tuple(kernel for kernel, _ in kernels),
            passing=tuple((step, size) for step, (_, size) in enumerate(kernels) if size),
            steps=len(leaders),
            storages=tuple(storages.values()),
            last_uses=tuple(uses.get(index, -1) for index in range(count)),
            outputs=tuple(self._output(value, [*storages], symbols) for value in returned),
            sure="the graph's own order, with chains of element-wise ops fused: Inductor's schedule could not be read "
            f"({self.reason})",
        )

    def _kernel(self, leader: fx.Node, members: Sequence[fx.Node], symbols: Symbols) -> tuple[Kernel, int]:
        if len(members) == 1:
            return called(leader, symbols, self.scratch)
        inside = {home for node in members for home in self.groups.makes[node]}
        read = {
            _home(tensor): tensor
            for node in members for arg in node.all_input_nodes for tensor in _tensors(arg)
            if _home(tensor) not in inside
        }
        written = list(_tensors(leader))
        kernel = Kernel(
            name="fused " + " ".join(dict.fromkeys(map(_name, members))),
            op_class=_class(leader),
            bytes_read=sum(_bytes(tensor, symbols) for tensor in read.values()),
            bytes_written=sum(_bytes(tensor, symbols) for tensor in written),
            dtype=str(written[0].dtype).removeprefix("torch."),
            shapes=tuple(numbers(tensor.shape, symbols) for tensor in written),
        )
        return kernel, 0

    def _output(self, value: Any, storages: Sequence[int], symbols: Symbols) -> Output:
        example = _example(value) if isinstance(value, fx.Node) else value
        if not isinstance(example, Tensor):
            return Output(kind="none") if example is None else Output(kind="value", value=number(example, symbols))
        home = _home(example)
        found = self.groups.inputs.get(home)
        return Output(
            kind="storage" if found is None else "input",
            index=storages.index(home) if found is None else found[0],
            size=numbers(example.shape, symbols), stride=numbers(example.stride(), symbols),
            offset=number(example.storage_offset(), symbols), dtype=example.dtype,
        )


def _bytes(tensor: Tensor, symbols: Symbols) -> int:
    size = tensor.dtype.itemsize
    for length in numbers(tensor.shape, symbols):
        size *= length
    return size

"""Dynamo compiles the ops of a block, and never the mode that sees those which it leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from tightfit.backends.pytorch.follow.dispatch_mode import DispatchMode

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Listening(DispatchMode):
    """Works on tensors of its own at every op, which a compiler would make a graph of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        self.count(torch.zeros(1))
        return func(*args, **(kwargs or {}))

    def count(self, seen: torch.Tensor) -> torch.Tensor:
        return seen + len(self.seen)


class Graphs(list[list[str]]):
    """The functions of each graph that a compiler is given."""

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Any:
        self.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def test_ops_behind_a_graph_break_are_seen_by_a_mode_that_is_not_compiled(graphs):
    compiled = torch.compile(lambda x: x.cos() * float(x.sum()), backend=graphs)
    with Listening() as mode:
        compiled(torch.ones(4))
    assert graphs == [["cos", "sum"], ["<built-in function mul>"]]
    assert "aten._local_scalar_dense.default" in mode.seen  # the read, which no graph holds


def test_ops_of_modules_that_dynamo_passes_over_are_seen_by_a_mode_that_is_not_compiled(graphs):
    torchs_own = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    torchs_own.compile(backend=graphs)
    with Listening() as mode, torch.no_grad():
        torchs_own(torch.ones(2, 4))
    assert graphs == []
    assert mode.seen[-1] == "aten.relu.default"

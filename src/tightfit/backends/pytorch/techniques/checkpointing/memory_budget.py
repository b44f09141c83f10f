"""The compiler's memory budget, with random numbers kept.

Under a budget below 1 the partitioner may recompute what random numbers made, and draws others than the forward pass
did: the gradients of dropout are then wrong, with no warning (pytorch issue 190758, torch 2.13). Marking those results
as not to be recomputed, before the graph is partitioned, keeps the gradients right.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch._functorch.config
import torch._inductor.config
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

SMALLEST_BUDGET = 1e-6
"""A budget of exactly 0 skips every mark; this one recomputes as much."""


@contextmanager
def memory_budget(budget: float) -> Iterator[None]:
    """Compile under `budget`, the share of the activations to keep."""
    settings: dict[str, Any] = {
        "activation_memory_budget": max(budget, SMALLEST_BUDGET),
        "joint_custom_pass": _mark_joint,
        # This cache's key leaves the pass out: it may hold graphs that were cut without it.
        "enable_autograd_cache": False,
    }
    # Inductor replaces random ops by its own after that pass, hence a second one.
    with (
        torch._functorch.config.patch(settings),
        torch._inductor.config.patch(joint_custom_post_pass=_MarkInductor()),
    ):
        yield


def _mark_joint(module: fx.GraphModule, inputs: Any) -> fx.GraphModule:
    _mark(module.graph)
    return module


class _MarkInductor(CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        _mark(graph)

    def uuid(self) -> str:
        return "keep random numbers, 1"


def _mark(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            for kept in (node, *(user for user in node.users if user.target is operator.getitem)):
                kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE

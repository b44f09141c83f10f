"""A micro-batch's forward and backward pass that stops at every block, so that others go through the block beside it.

The forward pass is the model's own, in a coroutine that is suspended where the model calls a block. Each block's
outputs are cut off from the autograd graph behind it: the backward pass then goes block by block as well. What a model
computes between its blocks belongs to the block whose output it depends on, and is run backward with that.
"""

from __future__ import annotations

import contextvars
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_map_only

from tightfit.backends.pytorch.techniques.by_block.parts import WITHOUT_BLOCKS
from tightfit.errors import ModelError

OUTSIDE_OF_BLOCKS = -1
"""Number of what depends on no block's output."""


class _GraphCut:
    """A tensor where the graph is cut: what leads to it, and the gradient that arrives at it.

    call: the number of the block's call whose output it is, or depends on.
    """

    def __init__(self, tensor: Tensor, call: int) -> None:
        self.edge = get_gradient_edge(tensor)
        self.call = call
        self.gradient: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


class _CatchGradient(torch.autograd.Function):
    """The identity after a cut: its gradient stays there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, cut: _GraphCut) -> Tensor:
        ctx.cut = cut
        ctx.mark_dirty(tensor)  # the very tensor, not a view of it, which models might not write to
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.cut.add(gradient)
        return None, None, None


@contextmanager
def _grad_and_autocast_restored() -> Iterator[None]:
    """Context of work of another coroutine of this thread: whether gradients are computed, and what is cast, are
    afterwards as before. A model may call a block inside `no_grad` or an autocast of its own."""
    learns = torch.is_grad_enabled()
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    try:
        yield
    finally:
        torch.set_grad_enabled(learns)
        for kind, enabled, dtype in casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


class SuspendedPass:
    """A micro-batch's pass. forward: runs its forward pass, and calls `call` for every call of a block. learns: whether
    a block has parameters that learn.

    at: the block that it waits for; None once the forward pass is over.
    """

    def __init__(self, forward: Callable[[], Tensor], learns: Callable[[int], bool]) -> None:
        self._learns = learns
        self.at: int | None = None
        self.loss: Tensor | None = None
        self._calls = 0
        self._outputs: dict[int, list[_GraphCut]] = defaultdict(list)
        self._between: list[_GraphCut] = []
        self._known: dict[tuple[int, int], weakref.ref[Tensor]] = {}
        self._anchor = torch.empty(0, requires_grad=True)
        self._scheduler = getcurrent()
        self._coroutine = greenlet(lambda: self._run(forward))
        self._coroutine.gr_context = contextvars.copy_context()

    def advance(self) -> None:
        """Go on with the forward pass up to the next call of a block, or its end."""
        self._scheduler = self._coroutine.parent = getcurrent()
        with _grad_and_autocast_restored():
            self._coroutine.switch()

    def close(self) -> None:
        """End a forward pass that is not over."""
        if self._coroutine and not self._coroutine.dead:
            self._coroutine.parent = getcurrent()
            with _grad_and_autocast_restored():
                self._coroutine.throw()

    def call(self, number: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wait for the block's turn, and run it; called by the forward pass."""
        self.at = number
        with _grad_and_autocast_restored():
            self._scheduler.switch()
        args, kwargs = tree_map_only(Tensor, self._cut_argument, (args, kwargs))
        output = call(*args, **kwargs)
        made = self._calls
        self._calls += 1
        output = tree_map_only(Tensor, lambda tensor: self._cut_output(tensor, made), output)
        if made not in self._outputs and torch.is_grad_enabled() and self._learns(number):
            raise ModelError(f"accumulation: block {number + 1} returns {type(output).__name__}, in which no tensor "
                             "that learns is found, and by-block works between the blocks; return tensors, tuples or "
                             f"dictionaries of them, or write {WITHOUT_BLOCKS}")
        return output

    def learns_from(self, call: int) -> bool:
        """Whether a block's call, or what depends on it, has a backward pass: below the first weight that learns none
        has."""
        return bool(self._outputs.get(call)) or any(cut.call == call for cut in self._between)

    def backward(self, call: int) -> None:
        """Run the backward pass of a block's call, given by its place in their order, and of what depends on it."""
        self._backward_between(call)
        _run_backward(self._outputs.pop(call, []))

    def backward_outside(self) -> None:
        """Run the backward pass of what comes before the blocks; call it last."""
        self._backward_between(OUTSIDE_OF_BLOCKS)

    def _run(self, forward: Callable[[], Tensor]) -> None:
        self.loss = forward()
        self.at = None

    def _cut_output(self, tensor: Tensor, call: int) -> Tensor:
        """A block's output, cut off from the block."""
        if not tensor.requires_grad:
            return tensor
        cut = _GraphCut(tensor, call)
        self._outputs[call].append(cut)
        return self._after_cut(tensor, cut)

    def _cut_argument(self, tensor: Tensor) -> Tensor:
        """A block's argument, cut off from what was computed between the blocks; a block's output is so already."""
        node = tensor.grad_fn
        if node is None or isinstance(getattr(node, "cut", None), _GraphCut):
            return tensor
        key = id(node), tensor.output_nr
        known = self._known.get(key, lambda: None)()
        if known is None:
            cut = _GraphCut(tensor, self._deepest(get_gradient_edge(tensor)))
            self._between.append(cut)  # whose edge keeps the node, so that its id stays its own
            known = self._after_cut(tensor, cut)
            self._known[key] = weakref.ref(known)
        return known

    def _after_cut(self, tensor: Tensor, cut: _GraphCut) -> Tensor:
        # Its data, which has a version of its own: what a block hands on as it came was saved for others before.
        after: Tensor = _CatchGradient.apply(tensor.data, self._anchor, cut)  # type: ignore[no-untyped-call]
        return after

    def _deepest(self, edge: GradientEdge) -> int:
        """The last block's call that a tensor depends on."""
        found = OUTSIDE_OF_BLOCKS
        seen: set[Node] = set()
        nodes: list[Node | None] = [edge.node]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            cut = getattr(node, "cut", None)
            if isinstance(cut, _GraphCut):
                found = max(found, cut.call)
            else:
                nodes += [following for following, _ in node.next_functions]
        return found

    def _backward_between(self, call: int) -> None:
        """Run backward what was computed between the blocks and depends on that call, and on none behind it."""
        _run_backward([cut for cut in self._between if cut.call == call])
        self._between = [cut for cut in self._between if cut.call != call]


def _run_backward(cuts: list[_GraphCut]) -> None:
    """Let the gradients that arrived at the cuts go on."""
    reached = [(cut.edge, cut.gradient) for cut in cuts if cut.gradient is not None]
    for cut in cuts:
        cut.gradient = None
    if reached:
        edges, gradients = zip(*reached, strict=True)
        del reached
        torch.autograd.backward(edges, gradients)

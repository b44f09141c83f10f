"""The model's blocks while steps run: each is made ready before it is called, and let go behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from tightfit.backends.pytorch.techniques.by_block.activations import HostActivations
from tightfit.backends.pytorch.techniques.by_block.transfers import Transfers, working_on

Call = Callable[..., Any]
Caller = Callable[[int, Call, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a block, given by its number, the call, and its arguments."""


class BlockCalls:
    """Every call of a block goes through here, outside of its compiled graph and of its recomputation.

    ready: called with a block's number, and that of the one expected next, before the block runs. done: called behind.
    """

    def __init__(self, stacks: Sequence[Sequence[nn.Module]], transfers: Transfers, activations: float = 0.0) -> None:
        """activations: share of the blocks whose activations wait in host memory."""
        self.blocks = tuple(dict.fromkeys(block for stack in stacks for block in stack))
        self.transfers = transfers
        count = round(activations * len(self.blocks))
        self.activations = HostActivations(transfers, self.blocks, count) if count else None
        self.ready: list[Callable[[int, int | None], None]] = []
        self.done: list[Callable[[int], None]] = []
        self._caller: Caller = self._at_once
        for number, block in enumerate(self.blocks):
            # The outermost place of a module's call: `_call_impl` runs its hooks and its forward, compiled or not.
            call = block._compiled_call_impl or block._call_impl
            block._compiled_call_impl = partial(self._called, number, call)

    @contextmanager
    def called_by(self, caller: Caller) -> Iterator[None]:
        """Inside, calls of blocks go to `caller`, who sees to `enter` and `leave` as well."""
        before, self._caller = self._caller, caller
        try:
            yield
        finally:
            self._caller = before

    def enter(self, number: int, then: int | None = None) -> None:
        """Make a block ready. then: the one that is expected next."""
        with working_on(self.blocks[number]):
            for ready in self.ready:
                ready(number, then)

    def leave(self, number: int) -> None:
        """A block is not used any more for now."""
        with working_on(self.blocks[number]):
            for done in reversed(self.done):
                done(number)

    def _called(self, number: int, call: Call, *args: Any, **kwargs: Any) -> Any:
        if self.activations is not None:
            call = partial(self.activations.run, number, call)
        return self._caller(number, call, args, kwargs)

    def _at_once(self, number: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.enter(number, number + 1 if number + 1 < len(self.blocks) else None)
        try:
            return call(*args, **kwargs)
        finally:
            self.leave(number)

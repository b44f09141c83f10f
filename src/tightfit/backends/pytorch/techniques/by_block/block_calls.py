"""The model's blocks while steps run: each is made ready before it is called, and let go behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tightfit.backends.pytorch.replaced import replaced
from tightfit.backends.pytorch.techniques.by_block.activations import HostActivations
from tightfit.backends.pytorch.techniques.by_block.parts import WITHOUT_BLOCKS, Parts
from tightfit.backends.pytorch.techniques.by_block.transfers import Transfers, active_watch
from tightfit.backends.pytorch.techniques.loss.of_logits import LOSS_OF_LOGITS, Loss
from tightfit.errors import ModelError

if TYPE_CHECKING:
    from tightfit.backends.pytorch.build import Build
    from tightfit.backends.pytorch.techniques.by_block.update import UpdateByBlock

Call = Callable[..., Any]
Caller = Callable[[int, Call, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a block, given by its number, the call, and its arguments."""


class BlockCalls:
    """Every call of a block goes through here, outside of its compiled graph and of its recomputation; those of the
    embeddings as well, where their weights wait in host memory.

    update: of the parts, which brings each one's weights; it comes here by itself. around_updates: entered around the
    update of each. in_use: the parts in use.
    """

    update: UpdateByBlock
    around_updates: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(
        self, parts: Parts, transfers: Transfers, *, activations: float = 0.0, embeddings: bool = False,
        loss: Loss = LOSS_OF_LOGITS,
    ) -> None:
        """activations: share of the blocks whose activations wait in host memory. embeddings: whether their weights
        do."""
        self.parts, self.transfers, self._loss = parts, transfers, loss
        count = round(activations * len(parts.blocks))
        self.activations = HostActivations(transfers, parts.blocks, count) if count else None
        self.in_use: set[int] = set()
        self._caller: Caller = self._call_now
        self._before: dict[nn.Module, Any] = {}
        for number, block in enumerate(parts.blocks):
            self._wrap(block, partial(self._called, number))
        for number, modules in parts.end_modules.items() if embeddings else ():
            for module in modules:
                self._wrap(module, partial(self._called_end, number, module))

    def called_by(self, caller: Caller) -> AbstractContextManager[None]:
        """Context in which calls of blocks go to `caller`, who sees to `begin` and `end` as well, and to
        `end_embeddings`."""
        return replaced(self, "_caller", caller)

    def close(self) -> None:
        """Let modules be called as they were before."""
        for module, before in self._before.items():
            module._compiled_call_impl = before

    def begin(self, part: int, next_part: int | None = None) -> None:
        """Make a part ready. next_part: the one that is expected next."""
        self.in_use.add(part)
        with active_watch().working_on(self.parts.modules[part]):
            self.update.make_ready(part, next_part)

    def end(self, part: int) -> None:
        """A part is not used any more for now."""
        with active_watch().working_on(self.parts.modules[part]):
            self.update.release(part)
        self.in_use.discard(part)

    def end_all(self) -> None:
        """No part is used any more."""
        for part in sorted(self.in_use):
            self.end(part)

    def end_embeddings(self) -> None:
        """No embedding is used any more for now."""
        for part in sorted(self.in_use & self.parts.end_modules.keys()):
            self.end(part)

    def _wrap(self, module: nn.Module, caller: Call) -> None:
        """Let `caller` run a module's calls: at their outermost place, for `_call_impl` runs hooks and forward,
        compiled or not."""
        self._before[module] = before = module._compiled_call_impl
        module._compiled_call_impl = partial(caller, before or module._call_impl)

    def _called(self, number: int, call: Call, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_autograd_node() is not None:
            raise ModelError("accumulation: the model calls its blocks again in the backward pass, as checkpointing of "
                             "its own does; leave that to the recipe, checkpointing=every-block, or write "
                             + WITHOUT_BLOCKS)
        if self.activations is not None:
            call = partial(self.activations.run, number, call)
        return self._caller(number, call, args, kwargs)

    def _call_now(self, number: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.begin(number, self.parts.next_block(number))
        try:
            return call(*args, **kwargs)
        finally:
            _drop_casts()
            self.end(number)

    def _called_end(self, number: int, module: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Any:
        """An embedding's call; in training a head's backward pass follows at once, and only a sweep knows its end."""
        if self._loss.takes_input(module, len(args)):
            return call(*args, **kwargs)
        learns = torch.is_grad_enabled()
        if number not in self.in_use:
            self.end_embeddings()
            self.begin(number)
        if learns and isinstance(module, nn.Linear):
            self.update.fetch_gradients(number, None)
        try:
            # A model's code may have moved ids to where the weights wait, as Llama 4's does.
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(self.transfers.device), (args, kwargs))
            return call(*args, **kwargs)
        finally:
            if not learns:
                _drop_casts()
                self.end_embeddings()


def block_calls_of(build: Build) -> BlockCalls:
    """The calls of a build's blocks from now on."""
    transfers, share = Transfers(build.torch_device, pinned=build.device.kind == "cuda"), build.host_share
    parts = Parts(build.model, build.blocks, frozen=build.recipe.trainable.freezes)
    return BlockCalls(parts, transfers, activations=share.activations, embeddings=share.embeddings, loss=build.loss)


def _drop_casts() -> None:
    """Let go of autocast's casts of weights, which it would keep of every block where none is kept for a backward
    pass."""
    if not torch.is_grad_enabled():
        torch.clear_autocast_cache()

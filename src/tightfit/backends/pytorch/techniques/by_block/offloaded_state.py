"""Offloaded weights, gradients and optimizer states: which parts' stay on the GPU, which live in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.by_block.parts import Parts
from tightfit.backends.pytorch.techniques.by_block.streamed_tensors import StreamedTensors
from tightfit.backends.pytorch.techniques.by_block.transfers import Transfers
from tightfit.trace import Category


class OffloadedState:
    """The places of each part's tensors. What is not in host memory stays on the device."""

    def __init__(self, build: Build, parts: Parts, transfers: Transfers) -> None:
        self.parts = parts
        share = build.host_share
        self._transfers = transfers
        self._weights, self._gradients, self._states = (
            StreamedTensors(transfers, parts.modules, category, bind, len(parts.blocks))
            for category, bind in ((Category.WEIGHTS, self._bind_weights), (Category.GRADIENTS, self._bind_gradients),
                                   (Category.OPTIMIZER, self._bind_states)))
        self._gradients_leave = parts.first(share.gradients, embeddings=share.embeddings)
        every = range(len(parts.modules))
        self._states_leave = every if share.optimizer == 1 else parts.first(share.optimizer, embeddings=False)
        self._optimizer: Optimizer | None = None
        self._held: dict[int, list[Tensor | None]] = {}
        self._keys: dict[int, list[tuple[nn.Parameter, str]]] = {}
        self._sent: int | None = None
        self._summed: set[int] = set()
        for part in sorted(parts.first(share.weights, embeddings=share.embeddings)):
            self._weights.move_in(part, [p.data for p in parts.parameters[part]])
            self._bind_weights(part, None)

    def enter(self, part: int, then: int | None) -> None:
        """Use a part's weights on the device from here on. then: the part that is expected next."""
        self._weights.enter(part, then)

    def leave(self, part: int) -> None:
        """A part's weights are not used any more for now."""
        self._weights.leave(part)
        if part in self.parts.end_modules and part in self._weights:  # large, and not used again soon
            self._weights.wait_for_copies_out(part)
            self._weights.release(part)

    def fetch_gradients(self, part: int, then: int | None) -> None:
        """Let a part's backward passes add to the gradients that earlier ones of this step left in host memory."""
        if part in self._summed and not self._gradients.is_entered(part):
            parameters = self.parts.parameters[part]
            added = [parameter.grad for parameter in parameters]
            here = part not in self._weights or self._weights.is_entered(part)
            if not here:  # a gradient is bound to weights of its device
                self._weights.enter(part)
            self._gradients.wait_for_copies_out(part)  # which may read the place that is added to
            self._gradients.enter(part, then if then in self._summed else None)
            for parameter, gradient in zip(parameters, added, strict=True):
                if gradient is not None and parameter.grad is not None:
                    parameter.grad.add_(gradient)
            if not here:
                self._weights.leave(part)

    def store_gradients(self, part: int, final: bool, *, leave: bool = True) -> None:
        """A part's gradients of a sweep are summed. Those of the device stay where passes add to them until they are
        `final`, and are kept out of the optimizer's sight then. leave: whether final ones may go to host memory."""
        parameters = self.parts.parameters[part]
        found = [parameter.grad for parameter in parameters]
        gradients = [gradient for gradient in found if gradient is not None]
        if part in self._gradients_leave and found and len(gradients) == len(found) and (leave or not final):
            self._free_sent_gradients()
            self._gradients.copy_out(part, gradients)
            self._gradients.leave(part)
            self._sent = part
            (self._summed.discard if final else self._summed.add)(part)
        elif final:
            self._held[part] = found
            self._summed.discard(part)
        else:
            return
        for parameter in parameters:
            parameter.grad = None

    def drop_gradients(self) -> None:
        """Learn nothing from the gradients."""
        self._held.clear()

    def abandon_gradients(self) -> None:
        """Forget the gradients of a step that failed, wherever they lie."""
        self.drop_gradients()
        self._summed.clear()
        for part, parameters in enumerate(self.parts.parameters):
            self._gradients.leave(part)
            for parameter in parameters:
                parameter.grad = None
        self.all_learned()

    @contextmanager
    def learning(self, part: int, then: int | None, optimizer: Optimizer) -> Iterator[None]:
        """A part's gradients and states are on the device inside. then: the part that learns next."""
        self._optimizer = optimizer
        parameters = self.parts.parameters[part]
        held = self._held.pop(part, None)
        if held is None:
            self._gradients.enter(part, then)
        else:  # they never left, and what an earlier step sent is of no use
            for parameter, gradient in zip(parameters, held, strict=True):
                parameter.grad = gradient
        try:
            self._states.enter(part, then)
            yield
            self._weights.copy_back(part)
            self._states.copy_back(part)
        except BaseException:
            if held is not None:  # for an update that did not begin
                self._held[part] = held
                for parameter in parameters:
                    parameter.grad = None
            raise
        finally:
            self._states.leave(part)
            self._gradients.leave(part)
        self._adopt_states(part)

    def all_learned(self) -> None:
        """No part learns for now: give back the places of gradients and states."""
        self._free_sent_gradients()
        self._transfers.wait_for_copies_out()
        self._forget_copies_out()
        self._gradients.release()
        self._states.release()

    def forget_states(self) -> None:
        """The optimizer is about to be another one."""
        self._states.forget()
        self._keys.clear()

    def reload(self, optimizer: Optimizer) -> None:
        """Weights and states were written where they wait, or the states are new."""
        self._optimizer = optimizer
        self._weights.drop()
        self._states.drop()

    def wait_on_host(self) -> None:
        """Let the host wait for every copy: what waits in its memory may be read and written then."""
        self._transfers.wait_on_host()
        self._forget_copies_out()

    def _forget_copies_out(self) -> None:
        for kind in (self._weights, self._gradients, self._states):
            kind.forget_copies_out()

    def close(self, model: nn.Module) -> None:
        """Give the weights back as an ordinary model's: on the device, or all in host memory where it lacks room.
        The host waited for every copy."""
        self._weights.release()
        try:
            for part in [part for part in range(len(self.parts.modules)) if part in self._weights]:
                for parameter in self.parts.parameters[part]:
                    parameter.data = parameter.data.to(self._transfers.device, copy=True)
        except torch.OutOfMemoryError:
            model.to("cpu")

    def host_bytes(self) -> dict[str, int]:
        """Bytes of host memory, by what they hold."""
        return {"weights": self._weights.host_bytes, "gradients": self._gradients.host_bytes,
                "optimizer": self._states.host_bytes}

    def _free_sent_gradients(self) -> None:
        """Let go of the gradients that were sent last, once they have arrived."""
        if self._sent is not None:
            self._gradients.wait_for_copies_out(self._sent)
            if self._sent in self.parts.end_modules:
                self._gradients.release(self._sent)
            self._sent = None

    def _adopt_states(self, part: int) -> None:
        """Give states host memory once the optimizer has made them: some may come later than others."""
        assert self._optimizer is not None
        if part not in self._states_leave:
            return
        states = list(_states(self._optimizer, self.parts.parameters[part]))
        keys = [(parameter, key) for parameter, key, _ in states]
        if states and keys != self._keys.get(part):
            self._states.copy_out(part, [tensor for _, _, value in states for tensor in plain_tensors(value)])
            self._keys[part] = keys
            self._bind_states(part, None)
            self._states.wait_for_copies_out(part)

    def _bind_weights(self, part: int, tensors: Sequence[Tensor] | None) -> None:
        for parameter, tensor in zip(self.parts.parameters[part], tensors or self._weights.views(part), strict=True):
            parameter.data = tensor

    def _bind_gradients(self, part: int, tensors: Sequence[Tensor] | None) -> None:
        for number, parameter in enumerate(self.parts.parameters[part]):
            parameter.grad = None if tensors is None else tensors[number]

    def _bind_states(self, part: int, tensors: Sequence[Tensor] | None) -> None:
        assert self._optimizer is not None
        left = iter(tensors or self._states.views(part))
        for parameter, key in self._keys[part]:
            state: dict[str, Any] = self._optimizer.state[parameter]
            state[key] = with_tensors(state[key], left)


def _states(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
    """Optimizer states of parameters; those of no dimension, such as counts of steps, stay where they are."""
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim():
                yield parameter, key, value


def plain_tensors(value: Tensor) -> Iterator[Tensor]:
    """The tensors that a state consists of: itself, or those that a wrapper such as a quantized one holds."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, name))
    else:
        yield value


def with_tensors(value: Tensor, parts: Iterator[Tensor]) -> Any:
    """The same state over other tensors, in the order of `plain_tensors`."""
    if not is_traceable_wrapper_subclass(value):
        return next(parts)
    names, context = value.__tensor_flatten__()
    inner = {name: with_tensors(getattr(value, name), parts) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())

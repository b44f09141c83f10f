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
from tightfit.backends.pytorch.techniques.optimizer.state import plain_tensors
from tightfit.trace import Category


class OffloadedState:
    """Weights, gradients and optimizer states of each part, in host memory or on the device.

    _resident: gradients that stay on the device, by part, out of the optimizer's sight until the part's update.
    _summed: parts whose gradients in host memory lack those of later sweeps.
    """

    def __init__(self, build: Build, parts: Parts, transfers: Transfers) -> None:
        self.parts = parts
        share = build.host_share
        self._transfers = transfers
        self._weights, self._gradients, self._states = (
            StreamedTensors(transfers, parts.modules, category, bind, len(parts.blocks))
            for category, bind in ((Category.WEIGHTS, self._bind_weights), (Category.GRADIENTS, self._bind_gradients),
                                   (Category.OPTIMIZER, self._bind_states)))
        self._gradient_parts = parts.first(share.gradients, embeddings=share.embeddings)
        every = range(len(parts.modules))
        self._state_parts = every if share.optimizer == 1 else parts.first(share.optimizer, embeddings=False)
        self._optimizer: Optimizer | None = None
        self._resident: dict[int, list[Tensor | None]] = {}
        self._keys: dict[int, list[tuple[nn.Parameter, str]]] = {}
        self._latest_offloaded: int | None = None
        self._summed: set[int] = set()
        for part in sorted(parts.first(share.weights, embeddings=share.embeddings)):
            if parts.weights[part]:
                self._weights.pack(part, [tensor.data for tensor in parts.weights[part]])
                self._bind_weights(part, None)

    def fetch_weights(self, part: int, next_part: int | None) -> None:
        """Use a part's weights on the device from here on. next_part: the part that is expected next."""
        self._weights.fetch(part, next_part)

    def fetch_learned(self, part: int, next_part: int | None) -> None:
        """Use a part's learned weights on the device, where an update changes them: beside frozen ones they are."""
        if not self.parts.frozen:
            self.fetch_weights(part, next_part)

    def release_weights(self, part: int) -> None:
        """A part's weights are not used any more for now."""
        self._weights.release(part)
        if part in self.parts.end_modules and part in self._weights:  # large, and not used again soon
            self._weights.wait_for_offload(part)
            self._weights.free_buffers(part)

    def fetch_gradients(self, part: int, next_part: int | None) -> None:
        """Let a part's backward passes add to the gradients that earlier ones of this step left in host memory."""
        if part in self._summed and not self._gradients.is_fetched(part):
            parameters = self.parts.parameters[part]
            added = [parameter.grad for parameter in parameters]
            here = self.parts.frozen or part not in self._weights or self._weights.is_fetched(part)
            if not here:  # a gradient is bound to weights of its device
                self._weights.fetch(part)
            self._gradients.wait_for_offload(part)  # which may read the buffer that is added to
            self._gradients.fetch(part, next_part if next_part in self._summed else None)
            for parameter, gradient in zip(parameters, added, strict=True):
                if gradient is not None and parameter.grad is not None:
                    parameter.grad.add_(gradient)
            if not here:
                self._weights.release(part)

    def store_gradients(self, part: int, final: bool, *, offload: bool = True) -> None:
        """A part's gradients of a sweep are summed. Those of the device stay where passes add to them until they are
        `final`, and are kept out of the optimizer's sight then. offload: whether final ones may go to host memory."""
        parameters = self.parts.parameters[part]
        found = [parameter.grad for parameter in parameters]
        gradients = [gradient for gradient in found if gradient is not None]
        if part in self._gradient_parts and found and len(gradients) == len(found) and (offload or not final):
            self._free_offloaded_gradients()
            self._gradients.offload(part, gradients)
            self._gradients.release(part)
            self._resident.pop(part, None)  # of an update that was given up
            self._latest_offloaded = part
            (self._summed.discard if final else self._summed.add)(part)
        elif final:
            self._resident[part] = found
            self._summed.discard(part)
        else:
            return
        for parameter in parameters:
            parameter.grad = None

    def drop_gradients(self) -> None:
        """Learn nothing from the gradients."""
        self._resident.clear()

    def release_gradients(self) -> None:
        """No part's gradients are on the device any more, where a step failed: updates that wait need their places."""
        for part, parameters in enumerate(self.parts.parameters):
            self._gradients.release(part)
            for parameter in parameters:
                parameter.grad = None

    def abandon_gradients(self) -> None:
        """Forget the gradients of a step that failed, wherever they lie."""
        self.drop_gradients()
        self._summed.clear()
        self.finish_updates()

    @contextmanager
    def updating(self, part: int, next_part: int | None, optimizer: Optimizer) -> Iterator[None]:
        """A part's gradients and states are on the device inside. next_part: the part that is updated next."""
        self._optimizer = optimizer
        parameters = self.parts.parameters[part]
        resident = self._resident.pop(part, None)
        try:
            if resident is None:
                self._gradients.fetch(part, next_part)
            else:  # they never left, and what an earlier step offloaded is of no use
                for parameter, gradient in zip(parameters, resident, strict=True):
                    parameter.grad = gradient
            self._states.fetch(part, next_part)
            yield
            if not self.parts.frozen:
                self._weights.write_back(part)
            self._states.write_back(part)
        except BaseException:
            if resident is not None:  # for an update that did not begin
                self._resident[part] = resident
                for parameter in parameters:
                    parameter.grad = None
            raise
        finally:
            self._states.release(part)
            self._gradients.release(part)
        self._adopt_states(part)

    def finish_updates(self) -> None:
        """No part is updated for now: give back the buffers of gradients and states."""
        self._free_offloaded_gradients()
        self._transfers.wait_for_copies_out()
        self._forget_offloads()
        self._gradients.free_buffers()
        self._states.free_buffers()

    def forget_states(self) -> None:
        """The optimizer is about to be another one."""
        self._states.clear()
        self._keys.clear()

    def reload(self, optimizer: Optimizer) -> None:
        """Weights and states were written where they wait, or the states are new. A checkpoint has none of a parameter
        that had not learned by then."""
        self._optimizer = optimizer
        self._weights.invalidate()
        self._states.invalidate()
        for part, known in [*self._keys.items()]:
            keys, tensors = self._states_of(part)
            if keys != known:
                self._states.forget(part)
                del self._keys[part]
            if keys and keys != known:
                self._states.pack(part, tensors)
                self._keys[part] = keys
                self._bind_states(part, None)

    def wait_on_host(self) -> None:
        """Let the host wait for every copy: what waits in its memory may be read and written then."""
        self._transfers.wait_on_host()
        self._forget_offloads()

    def _forget_offloads(self) -> None:
        for kind in (self._weights, self._gradients, self._states):
            kind.forget_offloads()

    def close(self, model: nn.Module) -> None:
        """Give the weights back as an ordinary model's: on the device, or all in host memory where it lacks room.
        The host waited for every copy."""
        self._weights.free_buffers()
        try:
            for part in [part for part in range(len(self.parts.modules)) if part in self._weights]:
                for tensor in self.parts.weights[part]:
                    tensor.data = tensor.data.to(self._transfers.device, copy=True)
        except torch.OutOfMemoryError:
            model.to("cpu")

    def _free_offloaded_gradients(self) -> None:
        """Let go of the gradients that were offloaded last, once they have arrived."""
        if self._latest_offloaded is not None:
            self._gradients.wait_for_offload(self._latest_offloaded)
            if self._latest_offloaded in self.parts.end_modules:
                self._gradients.free_buffers(self._latest_offloaded)
            self._latest_offloaded = None

    def _adopt_states(self, part: int) -> None:
        """Give states host memory once the optimizer has made them: some may come later than others."""
        if part not in self._state_parts:
            return
        keys, tensors = self._states_of(part)
        if keys and keys != self._keys.get(part):
            self._states.offload(part, tensors)
            self._keys[part] = keys
            self._bind_states(part, None)
            self._states.wait_for_offload(part)

    def _states_of(self, part: int) -> tuple[list[tuple[nn.Parameter, str]], list[Tensor]]:
        """A part's states by their names, and the tensors that they consist of."""
        assert self._optimizer is not None
        states = list(_states(self._optimizer, self.parts.parameters[part]))
        tensors = [tensor for _, _, value in states for _, tensor in plain_tensors(value)]
        return [(parameter, key) for parameter, key, _ in states], tensors

    def _bind_weights(self, part: int, tensors: Sequence[Tensor] | None) -> None:
        found = tensors or self._weights.host_views(part)
        for weight, tensor in zip(self.parts.weights[part], found, strict=True):
            weight.data = tensor

    def _bind_gradients(self, part: int, tensors: Sequence[Tensor] | None) -> None:
        for number, parameter in enumerate(self.parts.parameters[part]):
            parameter.grad = None if tensors is None else tensors[number]

    def _bind_states(self, part: int, tensors: Sequence[Tensor] | None) -> None:
        assert self._optimizer is not None
        left = iter(tensors or self._states.host_views(part))
        for parameter, key in self._keys[part]:
            state: dict[str, Any] = self._optimizer.state[parameter]
            state[key] = with_tensors(state[key], left)


def _states(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
    """Optimizer states of parameters; those of no dimension, such as counts of steps, stay where they are."""
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim():
                yield parameter, key, value


def with_tensors(value: Tensor, parts: Iterator[Tensor]) -> Any:
    """An optimizer state over other tensors, in the order of `plain_tensors`."""
    if not is_traceable_wrapper_subclass(value):
        return next(parts)
    names, context = value.__tensor_flatten__()
    inner = {name: with_tensors(getattr(value, name), parts) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())

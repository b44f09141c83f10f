"""Where a model's blocks have their weights, gradients and optimizer states: on the device, or in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.by_block.streamed import Streamed
from tightfit.backends.pytorch.techniques.by_block.transfers import Transfers


class Residence:
    """The places of each block's tensors. What is not in host memory stays on the device.

    parameters: of each block, without those that others share. outside: the rest.
    """

    def __init__(self, build: Build, blocks: Sequence[nn.Module]) -> None:
        self.parameters = own_parameters(build.model, blocks)
        inside = {p for parameters in self.parameters for p in parameters}
        self.outside = [p for p in build.model.parameters() if p not in inside]
        self._share = build.host_share
        transfers = Transfers(build.torch_device, pinned=build.device.kind == "cuda")
        self._weights = Streamed(transfers, self._bind_weights)
        self._gradients = Streamed(transfers, self._bind_gradients)
        self._states = Streamed(transfers, self._bind_states)
        self._optimizer: Optimizer | None = None
        self._held: dict[int, list[Tensor | None]] = {}
        self._sent: int | None = None
        for block in self._first(build.host_share.weights):
            self._weights.send(block, [p.data for p in self.parameters[block]])
            self._bind_weights(block, None)

    def enter(self, block: int, then: int | None) -> None:
        """Use a block's weights on the device from here on. then: the block that is expected next."""
        self._weights.enter(block, then)

    def leave(self, block: int) -> None:
        """A block's weights are not used any more for now."""
        self._weights.leave(block)

    def gather_gradients(self, block: int, then: int | None) -> None:
        """Let a block's backward passes add to the gradients that earlier ones left in host memory."""
        self._gradients.enter(block, then)

    def put_gradients(self, block: int, final: bool) -> None:
        """A block's gradients of a sweep are summed. Those of the device stay where passes add to them until they are
        `final`, and are kept out of the optimizer's sight then."""
        parameters = self.parameters[block]
        found = [parameter.grad for parameter in parameters]
        gradients = [gradient for gradient in found if gradient is not None]
        if block in self._first(self._share.gradients) and len(gradients) == len(found):
            self.settle_gradients()
            self._gradients.send(block, gradients)
            self._gradients.leave(block)
            self._sent = block
        elif final:
            self._held[block] = found
        else:
            return
        for parameter in parameters:
            parameter.grad = None

    def settle_gradients(self) -> None:
        """Let go of the gradients that were sent last, once they have arrived."""
        if self._sent is not None:
            self._gradients.settle(self._sent)
            self._sent = None

    def drop_gradients(self) -> None:
        """Learn nothing from the gradients."""
        self._held.clear()
        for parameter in self.outside:
            parameter.grad = None

    @contextmanager
    def learning(self, block: int, then: int | None, optimizer: Optimizer) -> Iterator[None]:
        """A block's gradients and states are on the device inside. then: the block that learns next."""
        self._optimizer = optimizer
        parameters = self.parameters[block]
        for parameter, gradient in zip(parameters, self._held.pop(block, [None] * len(parameters)), strict=True):
            parameter.grad = gradient
        self._gradients.enter(block, then)
        self._states.enter(block, then)
        yield
        self._weights.changed(block)
        self._states.changed(block)
        self._states.leave(block)
        self._gradients.leave(block)
        self._adopt_states(block, optimizer)

    def forget_states(self) -> None:
        """The optimizer is about to be another one."""
        self._states.forget()

    def reload(self, optimizer: Optimizer) -> None:
        """Weights and states were written where they wait, or the states are new."""
        self._optimizer = optimizer
        self._weights.drop()
        self._states.forget()
        for block in range(len(self.parameters)):
            self._adopt_states(block, optimizer)

    def settle(self) -> None:
        """The host waits until what was sent to its memory has arrived."""
        for kind in (self._weights, self._states):
            kind.wait_on_host()

    def host_bytes(self) -> dict[str, int]:
        """Bytes of host memory, by what they hold."""
        kinds = {"weights": self._weights, "gradients": self._gradients, "optimizer": self._states}
        return {name: kind.host_bytes for name, kind in kinds.items()}

    def _first(self, share: float) -> range:
        """The blocks that this share of them are: the first ones, whose gradients come last."""
        return range(round(share * len(self.parameters)))

    def _adopt_states(self, block: int, optimizer: Optimizer) -> None:
        """Give a block's states host memory, once the optimizer has made them."""
        if block not in self._first(self._share.optimizer) or block in self._states:
            return
        found = [tensor for _, _, value in self._values(block, optimizer) for tensor in plain_tensors(value)]
        if found:
            self._states.send(block, found)
            self._bind_states(block, None)
            self._states.settle(block)

    def _values(self, block: int, optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """A block's optimizer states; those of no dimension, such as counts of steps, stay where they are."""
        for parameter in self.parameters[block]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    yield parameter, key, value

    def _bind_weights(self, block: int, tensors: Sequence[Tensor] | None) -> None:
        for parameter, tensor in zip(self.parameters[block], tensors or self._weights.views(block), strict=True):
            parameter.data = tensor

    def _bind_gradients(self, block: int, tensors: Sequence[Tensor] | None) -> None:
        for number, parameter in enumerate(self.parameters[block]):
            parameter.grad = None if tensors is None else tensors[number]

    def _bind_states(self, block: int, tensors: Sequence[Tensor] | None) -> None:
        assert self._optimizer is not None
        parts = iter(tensors or self._states.views(block))
        for parameter, key, value in [*self._values(block, self._optimizer)]:
            self._optimizer.state[parameter][key] = with_tensors(value, parts)


def own_parameters(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Each block's learned parameters that no other part of the model has as well."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    inside = {module: block for block in blocks for module in block.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(inside.get(module, model))
    return [[p for p in block.parameters() if p.requires_grad and owners[p] == {block}] for block in blocks]


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

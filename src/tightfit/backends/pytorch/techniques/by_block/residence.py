"""Where a model's blocks have their weights, gradients and optimizer states: on the device, or in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.by_block.block_calls import BlockCalls
from tightfit.backends.pytorch.techniques.by_block.streamed import Bind, Streamed
from tightfit.trace import Category


class Residence:
    """The places of each block's tensors. What is not in host memory stays on the device.

    parameters: of each block, without those that others share. outside: the rest.
    """

    def __init__(self, build: Build, calls: BlockCalls) -> None:
        self.blocks = blocks = calls.blocks
        self.parameters = own_parameters(build.model, blocks)
        inside = {p for parameters in self.parameters for p in parameters}
        self.outside = [p for p in build.model.parameters() if p not in inside]
        self._share = build.host_share
        self._transfers = transfers = calls.transfers
        self._weights = Streamed(transfers, blocks, Category.WEIGHTS, self._bind_weights)
        self._gradients = Streamed(transfers, blocks, Category.GRADIENTS, self._bind_gradients)
        self._states = Streamed(transfers, blocks, Category.OPTIMIZER, self._bind_states)
        self._parts = alike_parts(self.outside)
        roots = [build.model] * len(self._parts)
        self._states_outside = Streamed(transfers, roots, Category.OPTIMIZER, self._bind_states_outside, places=1)
        self._optimizer: Optimizer | None = None
        self._held: dict[int, list[Tensor | None]] = {}
        self._sent: int | None = None
        self._summed: set[int] = set()
        for block in self._first(build.host_share.weights):
            self._weights.move_in(block, [p.data for p in self.parameters[block]])
            self._bind_weights(block, None)

    def enter(self, block: int, then: int | None) -> None:
        """Use a block's weights on the device from here on. then: the block that is expected next."""
        self._weights.enter(block, then)

    def leave(self, block: int) -> None:
        """A block's weights are not used any more for now."""
        self._weights.leave(block)

    def gather_gradients(self, block: int, then: int | None) -> None:
        """Let a block's backward passes add to the gradients that earlier ones of this step left in host memory."""
        if block in self._summed:
            self._gradients.enter(block, then if then in self._summed else None)

    def put_gradients(self, block: int, final: bool) -> None:
        """A block's gradients of a sweep are summed. Those of the device stay where passes add to them until they are
        `final`, and are kept out of the optimizer's sight then."""
        parameters = self.parameters[block]
        found = [parameter.grad for parameter in parameters]
        gradients = [gradient for gradient in found if gradient is not None]
        if block in self._first(self._share.gradients) and len(gradients) == len(found):
            self.free_sent_gradients()
            self._gradients.copy_out(block, gradients)
            self._gradients.leave(block)
            self._sent = block
            (self._summed.discard if final else self._summed.add)(block)
        elif final:
            self._held[block] = found
        else:
            return
        for parameter in parameters:
            parameter.grad = None

    def free_sent_gradients(self) -> None:
        """Let go of the gradients that were sent last, once they have arrived."""
        if self._sent is not None:
            self._gradients.wait_for_copies_out(self._sent)
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
        held = self._held.pop(block, None)
        if held is None:
            self._gradients.enter(block, then)
        else:  # they never left, and what an earlier step sent is of no use
            for parameter, gradient in zip(parameters, held, strict=True):
                parameter.grad = gradient
        self._states.enter(block, then)
        yield
        self._weights.copy_back(block)
        self._states.copy_back(block)
        self._states.leave(block)
        self._gradients.leave(block)
        self._adopt(self._states, block, parameters, block in self._first(self._share.optimizer), self._bind_states)

    def all_learned(self) -> None:
        """No block learns before the next step: give back the places of gradients and states."""
        self.wait_for_copies_out(on_host=False)
        self._gradients.release()
        self._states.release()

    def learning_outside(self, optimizer: Optimizer) -> Iterator[list[nn.Parameter]]:
        """The parameters outside of the blocks, in parts whose gradients and states are on the device in turn."""
        self._optimizer = optimizer
        gradients = {parameter: parameter.grad for parameter in self.outside}
        for parameter in self.outside:
            parameter.grad = None
        for number, part in enumerate(self._parts):
            for parameter in part:
                parameter.grad = gradients.pop(parameter)
            self._states_outside.enter(number)
            yield part
            self._states_outside.copy_back(number)
            self._states_outside.leave(number)
            self._adopt(self._states_outside, number, part, self._share.optimizer == 1, self._bind_states_outside)
        self.wait_for_copies_out(on_host=False)
        self._states_outside.release()

    def forget_states(self) -> None:
        """The optimizer is about to be another one."""
        self._states.forget()
        self._states_outside.forget()

    def reload(self, optimizer: Optimizer) -> None:
        """Weights and states were written where they wait, or the states are new."""
        self._optimizer = optimizer
        self._weights.drop()
        self._states.drop()
        self._states_outside.drop()

    def wait_for_copies_out(self, on_host: bool) -> None:
        """What is computed from here on, or what the host does, comes after every copy into host memory."""
        latest = self._transfers.latest_out
        if latest is not None:
            latest.wait_on_host() if on_host else latest.wait()
            self._transfers.hold_copies_in(latest, self._transfers.now())
        for kind in (self._weights, self._gradients, self._states, self._states_outside):
            kind.forget_copies_out()

    def host_bytes(self) -> dict[str, int]:
        """Bytes of host memory, by what they hold."""
        states = self._states.host_bytes + self._states_outside.host_bytes
        return {"weights": self._weights.host_bytes, "gradients": self._gradients.host_bytes, "optimizer": states}

    def _first(self, share: float) -> range:
        """The blocks that this share of them are: the first ones, whose gradients come last."""
        return range(round(share * len(self.parameters)))

    def _adopt(self, kind: Streamed, number: int, parameters: Sequence[nn.Parameter], wanted: bool, bind: Bind) -> None:
        """Give states host memory, once the optimizer has made them."""
        assert self._optimizer is not None
        found = [tensor for _, _, value in values(self._optimizer, parameters) for tensor in plain_tensors(value)]
        if wanted and found and number not in kind:
            kind.copy_out(number, found)
            bind(number, None)
            kind.wait_for_copies_out(number)

    def _bind_weights(self, block: int, tensors: Sequence[Tensor] | None) -> None:
        for parameter, tensor in zip(self.parameters[block], tensors or self._weights.views(block), strict=True):
            parameter.data = tensor

    def _bind_gradients(self, block: int, tensors: Sequence[Tensor] | None) -> None:
        for number, parameter in enumerate(self.parameters[block]):
            parameter.grad = None if tensors is None else tensors[number]

    def _bind_states(self, block: int, tensors: Sequence[Tensor] | None) -> None:
        self._put_states(self.parameters[block], tensors or self._states.views(block))

    def _bind_states_outside(self, number: int, tensors: Sequence[Tensor] | None) -> None:
        self._put_states(self._parts[number], tensors or self._states_outside.views(number))

    def _put_states(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
        assert self._optimizer is not None
        left = iter(tensors)
        for parameter, key, value in [*values(self._optimizer, parameters)]:
            self._optimizer.state[parameter][key] = with_tensors(value, left)


def values(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
    """Optimizer states of parameters; those of no dimension, such as counts of steps, stay where they are."""
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim():
                yield parameter, key, value


def alike_parts(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in order, in runs that hold no more than the largest of them does."""
    largest = max((p.numel() for p in parameters), default=0)
    parts: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if parameter.numel() > room:
            parts.append([])
            room = largest
        parts[-1].append(parameter)
        room -= parameter.numel()
    return parts


def own_parameters(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Each block's learned parameters that no other part of the model has as well."""
    inside: dict[nn.Module, set[nn.Module]] = {}
    for block in blocks:
        for module in block.modules():
            inside.setdefault(module, set()).add(block)
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).update(inside.get(module, {model}))
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

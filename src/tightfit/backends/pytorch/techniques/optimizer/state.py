"""An optimizer's state as named tensors and plain values, and back, to the last bit.

A state tensor is named `<parameter>/<key>`, and a part of a quantized one `<parameter>/<key>/<part>`, the parameter
by its name in the model. Nothing is pickled: tensors go to safetensors, the rest to JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.backends.pytorch.sharding import is_sharded, shard_like
from tightfit.errors import CheckpointError

SHOWN = 5
"""Names that a message lists at most."""
AS_BEFORE = "write model and optimizer as the run began with them, or another output_dir"
"""The remedy for a checkpoint that does not fit."""


def state_tensors(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state as tensors by name, and the rest as values that JSON can hold.

    The tensors share the optimizer's memory where that is contiguous: write them before the next step.
    """
    tensors, scalars = _flatten(optimizer, model)
    meta = {"optimizer": type(optimizer).__name__, "scalars": scalars}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, meta


def load_state(
    optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], meta: Mapping[str, Any],
    make: Callable[[], None],
) -> None:  # fmt: skip
    """Give a new optimizer of the same kind, over the same model, the state that `state_tensors` returned.

    make: makes its states, by `make_states` of every parameter, those of some after others; then they are copied into.
    That may turn a weight of -0.0 into 0.0: restore the weights afterwards. Gradients are None when this returns.
    Group options, the learning rate among them, stay its own. Raises CheckpointError naming what is missing or differs;
    the optimizer is then of no further use.
    """
    check_kind(optimizer, meta)
    optimizer.state.clear()
    make()
    names = _names(model)
    owners = {name.partition("/")[0] for name in (*tensors, *meta["scalars"])}
    for parameter in list(optimizer.state):  # one that never had a gradient has no state yet
        if names[parameter] not in owners:
            del optimizer.state[parameter]

    own, scalars = _flatten(optimizer, model)
    if scalars.keys() != meta["scalars"].keys():
        raise CheckpointError(f"optimizer state: the checkpoint is of another model or optimizer; {AS_BEFORE}")
    copy_tensors("optimizer state", tensors, own)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                state[key] = meta["scalars"][f"{names[parameter]}/{key}"]


def check_kind(optimizer: Optimizer, meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError where `state_tensors` returned `meta` of another kind of optimizer."""
    if meta["optimizer"] != (kind := type(optimizer).__name__):
        raise CheckpointError(f"optimizer: the checkpoint holds the state of {meta['optimizer']}, and this is {kind}; "
                              "write the optimizer that the run began with, or another output_dir")


@torch.no_grad()
def copy_tensors(what: str, saved: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    """Copy every saved tensor into the live one of its name. Raises CheckpointError naming those that differ in name,
    shape or format; nothing is copied then."""
    if saved.keys() != live.keys():
        names = ", ".join(sorted(saved.keys() ^ live.keys())[:SHOWN])
        raise CheckpointError(f"{what}: the checkpoint is of another model or optimizer; they differ in {names}; "
                              f"{AS_BEFORE}")
    for name, tensor in live.items():
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            raise CheckpointError(f"{what}: {name} is {_form(saved[name])} in the checkpoint and {_form(tensor)} here; "
                                  f"{AS_BEFORE}")
    for name, tensor in live.items():
        tensor.copy_(shard_like(tensor, saved[name]))


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Use `learning_rate` from the next step on, in every parameter group."""
    for group in optimizer.param_groups:
        _set_rate(group, learning_rate)


def _set_rate(group: dict[str, Any], learning_rate: float) -> None:
    """Set a parameter group's learning rate, which some optimizers keep as a number and others as a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(learning_rate)
    else:
        group["lr"] = learning_rate


def _flatten(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's own state tensors, not copies, and its other state values, by name."""
    names = _names(model)
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"{names[parameter]}/{key}"
            if isinstance(value, Tensor):
                tensors.update((part, plain.detach()) for part, plain in plain_tensors(value, name))
            else:
                scalars[name] = value
    return tensors, scalars


def plain_tensors(tensor: Tensor, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of a tensor, by name: itself, or those that a wrapper such as a quantized state holds."""
    if is_sharded(tensor) or not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    attributes, _ = tensor.__tensor_flatten__()
    for attribute in attributes:
        yield from plain_tensors(getattr(tensor, attribute), f"{name}/{attribute}")


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def make_states(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Let an optimizer make the states of parameters, by one step with zero gradients and a learning rate of 0."""
    with _no_trace(optimizer, list(parameters)):
        optimizer.step()


@contextmanager
def _no_trace(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Zero gradients and a learning rate of 0 inside; afterwards no gradients, and rates and random state as before."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    devices = {parameter.device for parameter in parameters if parameter.is_cuda}
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group in optimizer.param_groups:
            _set_rate(group, 0.0)
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            _set_rate(group, rate)
        for parameter in parameters:
            parameter.grad = None


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"

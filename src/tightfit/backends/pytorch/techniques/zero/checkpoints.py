"""A run's checkpoint in the form that every other has, of weights and states that an engine holds in parts: a run goes
on with another number of processes, another stage, or without DeepSpeed.

The engine's optimizer has states of flat tensors, each of many parameters' parts; a parameter's own are asked of
DeepSpeed by its name. Values that are no tensors of the weights' size, such as a count of steps, are alike in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.checkpoints import named_tensors, read_tensors, restore_streams, write_state
from tightfit.backends.pytorch.sharding import UngatheredTensor, full_shape, full_tensor, is_sharded
from tightfit.backends.pytorch.techniques.optimizer.state import AS_BEFORE, SHOWN, check_kind, make_states
from tightfit.errors import CheckpointError


def save(build: Build, engine: Any, client: Optimizer, folder: Path) -> dict[str, Any]:
    """As `pytorch.checkpoints.save_state`. client: the optimizer that the engine steps."""
    if client.state:
        _link(engine, client)
    states: dict[str, Tensor | UngatheredTensor] = {}
    scalars: dict[str, Any] = {}
    for name, parameter in _learned(build.model).items():
        for key, value in _example(client).items():
            if not isinstance(value, Tensor):
                scalars[f"{name}/{key}"] = value
            elif value.dim() == 0:
                states[f"{name}/{key}"] = value
            else:
                gather = partial(_full_state, parameter, key, value.dtype)
                states[f"{name}/{key}"] = UngatheredTensor(full_shape(parameter), value.dtype, gather)
    meta = {"optimizer": type(client).__name__, "scalars": scalars}
    return {**write_state(_weights(build.model), states, meta, folder, build.world), "scaler": None}


def load(build: Build, engine: Any, client: Optimizer, folder: Path, meta: dict[str, Any]) -> None:
    """As `pytorch.checkpoints.load_state`, of what `save` or another technique wrote."""
    weights, states, streams = read_tensors(folder)
    model = build.model
    check_kind(client, meta["optimizer"])
    learned, expected = _learned(model), _weights(model)
    if weights.keys() != expected.keys():
        names = ", ".join(sorted(weights.keys() ^ expected.keys())[:SHOWN])
        raise CheckpointError(f"weights: the checkpoint is of another model; they differ in {names}; {AS_BEFORE}")
    if states:
        make_flat_states(engine, client)
        _link(engine, client)
        _copy_states(learned, client, states, meta["optimizer"]["scalars"], build.world.rank)
    _copy_weights(model, weights, build.world.rank)
    restore_streams(streams, meta, build.world)


def _learned(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _weights(model: nn.Module) -> dict[str, Tensor | UngatheredTensor]:
    """As `named_tensors`, with those that lie in parts to be gathered one by one."""
    found: dict[str, Tensor | UngatheredTensor] = {**named_tensors(model)}
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            found[name] = UngatheredTensor(full_shape(parameter), parameter.dtype, partial(full_tensor, parameter))
    return found


def _example(client: Optimizer) -> dict[str, Any]:
    """The state of one of the flat tensors; empty before the first step."""
    return next(iter(client.state.values()), {})


def _full_state(parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor:
    from deepspeed.utils import safe_get_full_optimizer_state

    whole: Tensor = safe_get_full_optimizer_state(parameter, key)
    return whole.view(full_shape(parameter)).to(dtype)  # DeepSpeed gathers all in fp32


def make_flat_states(engine: Any, client: Optimizer) -> None:
    """Let the engine's optimizer make the states of its flat tensors, by a step that learns nothing."""
    flats: list[nn.Parameter] = _flats(engine)
    buffers, groups = [flat.grad for flat in flats], client.param_groups
    own = [group["params"] for group in groups]
    try:
        if any(own):
            make_states(client, flats)
        else:  # stage 3 gives the optimizer one of them after the other, and leaves it none in between
            for number, flat in enumerate(flats):
                groups[0]["params"] = [flat]
                with _in_memory(engine.optimizer, number):
                    make_states(client, [flat])
    finally:
        for group, params in zip(groups, own, strict=True):
            group["params"] = params
        for flat, buffer in zip(flats, buffers, strict=True):
            flat.grad = buffer


@contextmanager
def _in_memory(held: Any, number: int) -> Iterator[None]:
    """Context in which a flat tensor of stage 3 and its states are in memory, which may else wait on a drive."""
    swaps = held._swappable_optimizer_subgroup(number)
    if swaps:
        held._optimizer_states_and_gradient_swap_in(number)
    yield
    if swaps:
        held._optimizer_states_and_gradient_swap_out(number)


def _set_part(parameter: nn.Parameter, whole: Tensor, rank: int, key: str | None = None) -> None:
    """Set this process's part of a parameter's fp32 copy, or of its state of that name: DeepSpeed's own function takes
    the part's size from what may be on a drive."""
    held: Any = parameter._z3_optimizer  # type: ignore[attr-defined]
    number, offset, size = held.grad_position[held.get_param_id(parameter)]
    with _in_memory(held, number):
        flat = held.fp32_partitioned_groups_flat[number]
        held_in = flat if key is None else held.optimizer.state[flat][key]
        held_in.data.narrow(0, offset, size).copy_(_part(whole, size, rank))


def _flats(engine: Any) -> Any:
    """The flat tensors that the engine's optimizer steps."""
    held = engine.optimizer
    return held.fp32_partitioned_groups_flat if _divides_weights(engine) else held.single_partition_of_fp32_groups


def _divides_weights(engine: Any) -> bool:
    return hasattr(engine.optimizer, "fp32_partitioned_groups_flat")


def _link(engine: Any, client: Optimizer) -> None:
    """Let parameters find their states: DeepSpeed does so in its first step, when only one group's are there."""
    if not _divides_weights(engine):
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        for parameters, flat in zip(engine.optimizer.bit16_groups, _flats(engine), strict=True):
            lazy_init_hp_params_optimizer_state(parameters, flat, client.state)


def _copy_states(
    learned: dict[str, nn.Parameter], client: Optimizer, states: dict[str, Tensor], scalars: dict[str, Any], rank: int
) -> None:
    from deepspeed.utils import safe_set_full_optimizer_state

    first = next(iter(learned))
    for name, parameter in learned.items():
        for key, value in _example(client).items():
            if isinstance(value, Tensor) and value.dim():
                whole = states.get(f"{name}/{key}")
                if whole is None or whole.shape != full_shape(parameter):
                    raise CheckpointError(f"optimizer state: the checkpoint has no {name}/{key} of this form; "
                                          f"{AS_BEFORE}")
                if is_sharded(parameter):
                    _set_part(parameter, whole, rank, key)
                else:
                    safe_set_full_optimizer_state(parameter, whole.to(value.device), key)
    for state in client.state.values():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                state[key] = scalars[f"{first}/{key}"]
            elif value.dim() == 0:
                value.copy_(states[f"{first}/{key}"])


def _part(whole: Tensor, size: int, rank: int) -> Tensor:
    """A process's part of values like a parameter's, the last one padded: DeepSpeed cuts only what divides evenly."""
    own = whole.flatten()[rank * size : (rank + 1) * size]
    return torch.nn.functional.pad(own, (0, size - own.numel()))


@torch.no_grad()
def _copy_weights(model: nn.Module, weights: dict[str, Tensor], rank: int) -> None:
    from deepspeed.utils import safe_set_full_fp32_param

    import deepspeed

    parameters = dict(model.named_parameters())
    for name, tensor in named_tensors(model).items():
        parameter = parameters.get(name)
        shape = tensor.shape if parameter is None else full_shape(parameter)
        if weights[name].shape != shape:
            raise CheckpointError(f"weights: {name} is {tuple(weights[name].shape)} in the checkpoint and "
                                  f"{tuple(shape)} here; {AS_BEFORE}")
        value = weights[name].to(tensor.device)
        if parameter is None:
            tensor.copy_(value)
            continue
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(value)
        if is_sharded(parameter):
            _set_part(parameter, value, rank)
        else:
            safe_set_full_fp32_param(parameter, value)

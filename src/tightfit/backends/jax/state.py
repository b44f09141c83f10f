"""Checkpoints, from which a step goes on exactly: weights, optimizer states, random key; as safetensors and JSON.

Weights have their canonical names, each layer apart, as in the PyTorch backend's checkpoints. A state tensor is
named `<parameter>/<path in the state>`; what belongs to no parameter, `/<path>`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tightfit.backends.jax.network import Network, is_stacked
from tightfit.backends.jax.update import State
from tightfit.errors import CheckpointError
from tightfit.tasks import Array

WEIGHTS, OPTIMIZER, RANDOM = "weights.safetensors", "optimizer.safetensors", "random.safetensors"


def save_state(network: Network, state: State, folder: Path) -> dict[str, Any]:
    """Write the three files into `folder`; return what is not a tensor, as JSON values."""
    host = jax.device_get(state)
    save_file(network.unstacked(host["params"]), folder / WEIGHTS)
    states = {name: array for _, parts in _state_parts(network, host["optimizer"]) for name, array in parts.items()}
    save_file(states, folder / OPTIMIZER)
    save_file({"jax": np.asarray(host["key"])}, folder / RANDOM)
    scaler = {name: array.item() for name, array in host["scaler"].items()} if "scaler" in host else None
    return {"steps": int(host["step"]), "scaler": scaler, "jax": jax.__version__}


def load_state(network: Network, abstract: State, folder: Path, meta: dict[str, Any]) -> State:
    """The state that `save_state` wrote, in the places of `abstract`. Raises CheckpointError where names, shapes or
    formats differ."""
    try:
        weights, states, streams = (load_file(folder / name) for name in (WEIGHTS, OPTIMIZER, RANDOM))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder}: {' '.join(str(error).split())}") from None
    if "jax" not in streams:
        raise CheckpointError(f"{folder}: this checkpoint is another backend's; write the backend it had")
    _check(folder, "weights", network.unstacked(_empty(abstract["params"])), weights)
    params = network.stacked(weights)
    empty = _empty(abstract["optimizer"])
    parts = list(_state_parts(network, empty))
    _check(folder, "optimizer state", {k: v for _, found in parts for k, v in found.items()}, states)
    read = [(stacked, [states[name] for name in found]) for stacked, found in parts]
    leaves = [np.stack(arrays) if stacked else arrays[0] for stacked, arrays in read]
    optimizer = jax.tree.unflatten(jax.tree.structure(empty), leaves)
    state = {"params": params, "optimizer": optimizer, "key": streams["jax"], "step": np.int32(meta["steps"])}
    if "scaler" in abstract:
        state["scaler"] = {name: np.asarray(meta["scaler"][name], a.dtype) for name, a in abstract["scaler"].items()}
    placed: State = jax.tree.map(lambda value, place: jax.device_put(value, place.sharding), state, abstract)
    return placed


def _empty(tree: Any) -> Any:
    return jax.tree.map(lambda a: np.empty(a.shape, a.dtype), tree)


def _state_parts(network: Network, optimizer: Any) -> list[tuple[bool, dict[str, Array]]]:
    """For each array of an optimizer's state, in its order: whether it holds every layer's, and its tensors by name."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(optimizer)[0]:
        keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
        owner = next((key for key in keys if key in network.weights), "")
        rest = "/".join(key for key in keys if key != owner)
        array = np.asarray(leaf)
        stacked = is_stacked(owner)
        parts = network.unstacked({owner: array})
        found.append((stacked, {f"{name}/{rest}": part for name, part in parts.items()}))
    return found


def _check(folder: Path, what: str, here: dict[str, Array], saved: dict[str, Array]) -> None:
    if here.keys() != saved.keys():
        names = ", ".join(sorted(here.keys() ^ saved.keys())[:3])
        raise CheckpointError(f"{folder}: its {what} is another recipe's; they differ in {names}")
    for name, array in here.items():
        if array.shape != saved[name].shape or array.dtype != saved[name].dtype:
            raise CheckpointError(f"{folder}: {name} is {saved[name].shape} {saved[name].dtype}, this recipe's model "
                                  f"has {array.shape} {array.dtype}")

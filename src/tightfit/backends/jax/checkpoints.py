"""Files of safetensors and JSON: the weights that a model starts from, models written for others to read, and
checkpoints, from which a step goes on exactly: weights, optimizer states, random key.

Weights have their canonical names, each layer apart, as in the PyTorch backend's checkpoints. A state tensor is
named `<parameter>/<path in the state>`; what belongs to no parameter, `/<path>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from tightfit.backends.jax.network import Network, is_stacked
from tightfit.backends.jax.update import State
from tightfit.errors import CheckpointError, ModelError, one_line
from tightfit.models import OUR_TRANSFORMER, TransformerConfig
from tightfit.tasks import Array

MODEL = "model.safetensors"
WEIGHTS, OPTIMIZER, RANDOM = "weights.safetensors", "optimizer.safetensors", "random.safetensors"


def read_weights(network: Network, folder: Path, dtype: Any) -> dict[str, Array]:
    """The stored weights, layers stacked, in `dtype`. Raises ModelError naming what is missing or of another shape."""
    try:
        stored = dict(_stored(network, folder))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model: the weights in {str(folder)!r} cannot be read: {one_line(error)}") from error
    needed = {full: weight.shape for name, weight in network.weights.items() for full in network.canonical(name)}
    if stored.keys() != needed.keys():
        names = ", ".join(sorted(stored.keys() ^ needed.keys())[:3])
        raise ModelError(f"model: the weights in {str(folder)!r} are another model's; they differ in {names}; take "
                         "back model_overrides, or write pretrained=false")
    for name, shape in needed.items():
        if stored[name].shape != shape:
            raise ModelError(f"model: the stored weight {name} has shape {stored[name].shape}, and the recipe asks for "
                             f"{shape}; take back the changed vocab_size or model_overrides, or write pretrained=false")
    return network.stacked({name: stored.pop(name).astype(dtype) for name in list(stored)})


def write_model(network: Network, arrays: dict[str, Array], folder: Path) -> None:
    """Write the configuration and the weights so that `model: <folder>` reads them, here and in PyTorch."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(network.unstacked(arrays), folder / MODEL, metadata={"format": "pt"})
    if isinstance(network.config, TransformerConfig):
        described = {"model_type": OUR_TRANSFORMER, **asdict(network.config)}
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    else:
        network.config.save_pretrained(folder)


def _stored(network: Network, folder: Path) -> Iterator[tuple[str, Array]]:
    """The weights in a folder's files that the network may want, by canonical name."""
    tied = {name for name in ("lm_head.weight",) if name not in network.weights}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                full = name if name in tied or name.startswith(network.stored_prefix) else network.stored_prefix + name
                full = name if name in network.weights else full
                if full not in tied and not name.endswith(network.unstored):
                    yield full, file.get_tensor(name)


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

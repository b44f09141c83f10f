"""Files of safetensors and JSON: the weights that a model starts from, models written for others to read, and
checkpoints, from which a step goes on exactly: weights, optimizer states, random key.

Weights have their canonical names, each layer apart, as in the PyTorch backend's checkpoints; all else is named by its
path in the state, such as `optimizer/mu/layers.*.mlp.input_layer.weight`.
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

from tightfit.backends.jax.network import Network
from tightfit.backends.jax.update import State
from tightfit.errors import CheckpointError, ModelError, one_line
from tightfit.files import follow_umask
from tightfit.hub import damaged_weights
from tightfit.models import OUR_TRANSFORMER, TransformerConfig
from tightfit.tasks import Array

MODEL_FILE = "model.safetensors"
WEIGHTS_FILE, OPTIMIZER_FILE = "weights.safetensors", "optimizer.safetensors"


def read_weights(network: Network, folder: Path) -> dict[str, Array]:
    """The stored weights, layers stacked, in fp32. Raises ModelError naming what is missing or of another shape."""
    try:
        stored = dict(_stored(network, folder))
    except SafetensorError as error:
        raise ModelError(damaged_weights(str(folder), error)) from error
    except OSError as error:
        raise ModelError(f"model: the weights in {str(folder)!r} cannot be read: {one_line(error)}") from error
    needed = {full: weight.shape for name, weight in network.weights.items() for full in network.checkpoint_names(name)}
    if stored.keys() != needed.keys():
        names = ", ".join(sorted(stored.keys() ^ needed.keys())[:3])
        raise ModelError(f"model: the weights in {str(folder)!r} are another model's; they differ in {names}; take "
                         "back model_overrides, or write pretrained=false")
    for name, shape in needed.items():
        if stored[name].shape != shape:
            raise ModelError(f"model: the stored weight {name} has shape {stored[name].shape}, and the recipe asks for "
                             f"{shape}; take back the changed vocab_size or model_overrides, or write pretrained=false")
    return network.stack_layers({name: stored.pop(name).astype(np.float32) for name in list(stored)})


def write_model(network: Network, arrays: dict[str, Array], folder: Path) -> None:
    """Write the configuration and the weights so that `model: <folder>` reads them, here and in PyTorch."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(network.unstack_layers(arrays), folder / MODEL_FILE, metadata={"format": "pt"})
    if isinstance(network.config, TransformerConfig):
        described = {"model_type": OUR_TRANSFORMER, **asdict(network.config)}
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    else:
        network.config.save_pretrained(folder)
    follow_umask(folder)


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
    """Write the files into `folder`; return what is not a tensor, as JSON values."""
    host = jax.device_get(state)
    save_file(network.unstack_layers(host["params"]), folder / WEIGHTS_FILE)
    save_file(_all_but_weights(host), folder / OPTIMIZER_FILE)
    follow_umask(folder)
    return {"jax": jax.__version__}


def load_state(network: Network, abstract: State, folder: Path) -> State:
    """The state that `save_state` wrote, in the places of `abstract`. Raises CheckpointError where names, shapes or
    formats differ."""
    try:
        weights, others = (load_file(folder / name) for name in (WEIGHTS_FILE, OPTIMIZER_FILE))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder}: {one_line(error)}") from None
    empty: State = jax.tree.map(lambda a: np.empty(a.shape, a.dtype), abstract)
    _check(folder, "weights", network.unstack_layers(empty["params"]), weights)
    needed = _all_but_weights(empty)
    _check(folder, "optimizer state", needed, others)
    rest = {name: tree for name, tree in empty.items() if name != "params"}
    read = jax.tree.unflatten(jax.tree.structure(rest), [others[name] for name in needed])
    placed: State = jax.tree.map(lambda value, place: jax.device_put(value, place.sharding),
                                 {**read, "params": network.stack_layers(weights)}, abstract)
    return placed


def _all_but_weights(state: State) -> dict[str, Array]:
    """The arrays of a state by their paths in it, in the tree's order."""
    rest = {name: tree for name, tree in state.items() if name != "params"}
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.array(leaf, order="C")
            for path, leaf in jax.tree_util.tree_flatten_with_path(rest)[0]}


def _check(folder: Path, what: str, here: dict[str, Array], saved: dict[str, Array]) -> None:
    if here.keys() != saved.keys():
        names = ", ".join(sorted(here.keys() ^ saved.keys())[:3])
        raise CheckpointError(f"{folder}: its {what} is another recipe's; they differ in {names}")
    for name, array in here.items():
        if array.shape != saved[name].shape or array.dtype != saved[name].dtype:
            raise CheckpointError(f"{folder}: {name} is {saved[name].shape} {saved[name].dtype}, this recipe's model "
                                  f"has {array.shape} {array.dtype}")

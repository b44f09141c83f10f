"""Models as networks: which one a recipe names, its stored weights, and writing it for others to read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tightfit.backends.jax.gpt2 import gpt2
from tightfit.backends.jax.llama import LLAMA_LIKE, llama
from tightfit.backends.jax.network import Network
from tightfit.backends.jax.transformer import transformer
from tightfit.errors import ModelError, one_line
from tightfit.models import (
    OUR_TRANSFORMER,
    TransformerConfig,
    explain_hub_error,
    resolve_source,
)
from tightfit.recipe import Recipe
from tightfit.tasks import Array

WEIGHTS = "model.safetensors"
FAMILIES = ("transformer-156m", "gpt2", *LLAMA_LIKE)
"""The models that are here."""


class Found(NamedTuple):
    """A recipe's model: its functions, the folder of its stored weights if it has any, notes as sentences."""

    network: Network
    stored: Path | None
    notes: tuple[str, ...] = ()


def find_network(recipe: Recipe, config: Any) -> Found:
    """The recipe's model. Raises ModelError for what cannot be found, and for what has no model here."""
    source = resolve_source(recipe)
    if source.kind == "factory":
        raise ModelError(f"model: {source.name} makes a torch module, and backend: jax has models of its own "
                         f"({', '.join(FAMILIES)}); write backend=pytorch")
    network = network_of(config, recipe.task)
    if source.kind == "bundled" or not recipe.pretrained:
        return Found(network, None)
    folder = Path(source.name) if source.kind == "folder" else _downloaded(source.name)
    if any(folder.glob("*.safetensors")):
        return Found(network, folder)
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(f"model: the weights in {str(folder)!r} are a PyTorch pickle, which backend: jax does not "
                         "read; save them as safetensors, or write backend=pytorch")
    return Found(network, None, (f"the folder {folder} holds no weights: the model starts from its configuration",))


def network_of(config: Any, task: str) -> Network:
    """The model that a configuration describes. Raises ModelError for one that has no counterpart here."""
    if isinstance(config, TransformerConfig):
        if task not in ("causal-lm", "masked-lm"):
            raise ModelError(f"task: the bundled transformer gives logits for each token, which {task} does not use; "
                             "write task=causal-lm")
        return transformer(config)
    makers = {"gpt2": gpt2, **dict.fromkeys(LLAMA_LIKE, llama)}
    if task != "causal-lm" or config.model_type not in makers:
        raise ModelError(f"model: backend: jax has no {task} model of type {config.model_type!r}; it has "
                         f"{', '.join(FAMILIES)} for causal-lm. Write backend=pytorch")
    return makers[config.model_type](config)


def read_weights(network: Network, folder: Path, dtype: Any) -> dict[str, Array]:
    """The stored weights, layers stacked, in `dtype`. Raises ModelError naming what is missing or of another shape."""
    try:
        stored = dict(_stored(network, folder))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model: the weights in {str(folder)!r} cannot be read: {one_line(error)}") from error
    _check(network, folder, {name: array.shape for name, array in stored.items()})
    return network.stacked({name: stored.pop(name).astype(dtype) for name in list(stored)})


def write_model(network: Network, arrays: dict[str, Array], folder: Path) -> None:
    """Write the configuration and the weights so that `model: <folder>` reads them, here and in PyTorch."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(network.unstacked(arrays), folder / WEIGHTS, metadata={"format": "pt"})
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


def _check(network: Network, folder: Path, stored: dict[str, tuple[int, ...]]) -> None:
    needed = network.canonical_shapes()
    if stored.keys() != needed.keys():
        names = ", ".join(sorted(stored.keys() ^ needed.keys())[:3])
        raise ModelError(f"model: the weights in {str(folder)!r} are another model's; they differ in {names}; take "
                         "back model_overrides, or write pretrained=false")
    for name, shape in needed.items():
        if stored[name] != shape:
            raise ModelError(f"model: the stored weight {name} has shape {stored[name]}, and the recipe asks for "
                             f"{shape}; take back the changed vocab_size or model_overrides, or write pretrained=false")


def _downloaded(name: str) -> Path:
    """The folder of a Hugging Face model in the local cache, fetched if need be."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # the hub's client and its transport each raise their own
        raise ModelError(explain_hub_error(name, error)) from error

"""From a recipe to a build: the model's functions and the flags for XLA, then every technique in the fixed order of the
slots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from tightfit.backends.base import absences
from tightfit.backends.jax.apply import ABSENT, APPLY
from tightfit.backends.jax.attention import IMPLEMENTATIONS
from tightfit.backends.jax.build import Build
from tightfit.backends.jax.decoders import FAMILIES, network_of
from tightfit.backends.jax.network import Network
from tightfit.devices import Device
from tightfit.errors import ModelError, RecipeError, Refused, one_line
from tightfit.hub import explain_hub_error, only_local
from tightfit.model_facts import model_facts
from tightfit.models import read_config, resolve_source
from tightfit.recipe import Recipe
from tightfit.tasks import get_task
from tightfit.techniques import SLOTS
from tightfit.techniques.backend import Jax

FLAGS = "backend.xla_flags"


def assemble(
    recipe: Recipe, device: Device, devices: tuple[Any, ...], model: Any = None, config: Any = None
) -> Build:
    """The model with every technique of a resolved recipe applied. No array is made.

    device: what the techniques are chosen for. devices: JAX's, which the step runs on, or is compiled for.
    config: the model's configuration, where it was read before.
    Raises Refused with all reasons where a technique cannot serve, and ModelError for a model that is not here.
    """
    if reasons := unserved(recipe) or recipe.refusals(device):
        raise Refused("; ".join(reasons))
    if model is not None:
        raise ModelError(f"model: a {type(model).__name__} cannot run in backend: jax, which has models of its own; "
                         "name one, or write backend=pytorch")
    assert isinstance(recipe.backend, Jax)
    config = read_config(recipe) if config is None else config
    network = find_network(recipe, config)
    stored, notes = _find_weights(recipe)
    build = Build(
        recipe=recipe, device=device, devices=devices, task=get_task(recipe.task), facts=model_facts(recipe, config),
        network=network, stored=stored, notes=notes,
        compiler_options=compiler_options(recipe.backend.xla_flags, devices),
    )
    techniques = [getattr(recipe, slot) for slot in SLOTS]
    return reduce(lambda sofar, technique: APPLY[type(technique)](technique, sofar), techniques, build)


def unserved(recipe: Recipe) -> list[str]:
    """Reasons against techniques that are absent here, and other fields that have no meaning."""
    reasons = {
        "pad_vocab_to": "the vocabulary is not padded in backend: jax; write vocab_size as a multiple yourself",
        "empty_cache_steps": "JAX gives no cached memory back; leave it out",
        "deterministic": "XLA has a flag for it; write backend.xla_flags=--xla_gpu_deterministic_ops=true in its place",
    }
    fields = [f"{field}: {reason}" for field, reason in reasons.items() if getattr(recipe, field)]
    kernel = getattr(recipe.attention, "kernel", "auto")
    if kernel not in IMPLEMENTATIONS:
        fields.append(f"attention.kernel: {kernel} is PyTorch's; write attention.kernel=cudnn, or auto")
    return [*absences(recipe, ABSENT), *fields]


def find_network(recipe: Recipe, config: Any) -> Network:
    """The functions of the recipe's model. Raises ModelError for one that has no counterpart here."""
    source = resolve_source(recipe)
    if source.kind == "factory":
        raise ModelError(f"model: {source.name} makes a torch module, and backend: jax has models of its own "
                         f"({', '.join(FAMILIES)}); write backend=pytorch")
    return network_of(config, recipe.task)


def _find_weights(recipe: Recipe) -> tuple[Path | None, tuple[str, ...]]:
    """The folder of the model's stored weights if it has any, and notes as sentences."""
    source = resolve_source(recipe)
    if source.kind == "bundled" or not recipe.pretrained:
        return None, ()
    folder = Path(source.name) if source.kind == "folder" else _downloaded(source.name)
    if any(folder.glob("*.safetensors")):
        return folder, ()
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(f"model: the weights in {str(folder)!r} are a PyTorch pickle, which backend: jax does not "
                         "read; save them as safetensors, or write backend=pytorch")
    return None, (f"the folder {folder} holds no weights: the model starts from its configuration",)


def _downloaded(name: str) -> Path:
    """The folder of a Hugging Face model in the local cache, fetched if need be."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"],
                                      local_files_only=only_local(name)))
    except Exception as error:  # the hub's client and its transport each raise their own
        raise ModelError(explain_hub_error(name, error)) from error


def compiler_options(flags: Sequence[str], devices: Sequence[Any]) -> dict[str, str]:
    """Flags for XLA, `--xla_name=value`, as options of a compilation for `devices`, each tried first: one that XLA does
    not know must not end a run. Raises RecipeError naming one that cannot be used."""
    options = {}
    for flag in flags:
        name, _, value = flag.removeprefix("--").partition("=")
        if not name.startswith("xla_"):
            raise RecipeError(f"{FLAGS}: {flag!r} should read --xla_NAME=VALUE")
        options[name] = value.title() if value.lower() in ("true", "false") else value or "True"
        small = jax.ShapeDtypeStruct((8,), "float32", sharding=SingleDeviceSharding(devices[0]))
        try:
            jax.jit(lambda x: x + x).lower(small).compile(compiler_options={name: options[name]})
        except jax.errors.JaxRuntimeError as error:
            raise RecipeError(f"{FLAGS}: {name} cannot be used ({one_line(error)}); leave it out, or write one that "
                              "this version of XLA knows") from None
    return options

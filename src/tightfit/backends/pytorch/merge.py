"""A run's adapter worked into its model's weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from tightfit.backends.base import DrawnAtRandom
from tightfit.backends.pytorch.apply import APPLY
from tightfit.backends.pytorch.assembly import bare_build
from tightfit.backends.pytorch.models import stored_source
from tightfit.backends.pytorch.saved_model import save_model
from tightfit.backends.pytorch.techniques.adapters.folder import BASE, load_adapter
from tightfit.backends.pytorch.techniques.adapters.layers import dequantize, frozen_layers
from tightfit.devices import Device
from tightfit.errors import CheckpointError
from tightfit.recipe import Recipe


def merge(recipe: Recipe, adapter: Path, folder: Path) -> tuple[str, ...]:
    """Write the model that a run of `recipe` trained an adapter of, with the adapter worked into its weights. Returns
    sentences on how.

    The weights are those that were trained beside: quantized ones are dequantized, not read anew. Raises
    CheckpointError for a folder that holds no adapter of this recipe, and ModelError as building the model does.
    """
    cpu = Device(kind="cpu", name="CPU", memory_bytes=0)
    notes: list[str] = []
    if (adapter / BASE).is_dir():
        recipe = recipe.override(model=str(adapter / BASE), model_overrides={}, pretrained=True, vocab_size=None,
                                 num_labels=None, base="as-is")
    elif stored_source(recipe) is None:
        raise CheckpointError(f"{adapter / BASE}: the weights that the adapter was trained beside are not there, and "
                              "are stored nowhere else; bring the folder back, or train again")
    elif recipe.frozen_base.quantizes:
        notes.append(f"the weights were held in {recipe.frozen_base.name}, beside which the adapter was trained: they "
                     f"are written dequantized, as {recipe.frozen_base.format(recipe)}")
    build = bare_build(recipe, cpu, torch.device("cpu"))
    missing = [note for note in build.notes if isinstance(note, DrawnAtRandom)]
    if missing and (adapter / BASE).is_dir():  # which the run wrote whole
        raise CheckpointError(f"{adapter / BASE}: {missing[0]}; bring the weights back that the adapter was trained "
                              "beside, or train again")
    for technique in (recipe.frozen_base, recipe.trainable):
        build = APPLY[type(technique)](technique, build)
    load_adapter(build, adapter)
    dtype = getattr(torch, recipe.frozen_base.format(recipe))
    for _, layer in [*frozen_layers(build.model)]:
        dequantize(layer, dtype)
    _untie(build.model)
    save_model(build.model, folder, _classes(adapter))
    return tuple(notes)


def _untie(model: nn.Module) -> None:
    """Say so in its configuration where an adapter made a head that was tied to the embeddings another one."""
    if not isinstance(model, PreTrainedModel):
        return
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not words.weight:
        model.config.tie_word_embeddings = False


def _classes(adapter: Path) -> dict[int, str] | None:
    """The names of classes in an adapter's folder; None where it names none."""
    try:
        named = json.loads((adapter / "config.json").read_text("utf-8"))["id2label"]
        return {int(number): name for number, name in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None

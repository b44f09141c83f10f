"""An adapter as a folder that `peft` reads, and a folder's adapter worked into its model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tightfit.backends.pytorch.apply import APPLY
from tightfit.backends.pytorch.assembly import bare_build
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.saved_model import name_classes, save_model
from tightfit.backends.pytorch.state import write_tensors
from tightfit.backends.pytorch.techniques.adapters.apply import classifier_head
from tightfit.backends.pytorch.techniques.adapters.layers import (
    FACTORS,
    LINEAR,
    FrozenConv1D,
    dequantize,
    frozen_layers,
)
from tightfit.devices import Device
from tightfit.errors import CheckpointError
from tightfit.models import resolve_source
from tightfit.recipe import Recipe

CONFIG, TENSORS, BASE = "adapter_config.json", "adapter_model.safetensors", "base"
"""Files of an adapter's folder, and the folder inside it for a model that is stored nowhere else."""
NAMES = dict(zip(FACTORS, ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"), strict=True))
"""peft's names of a layer's factors."""
PREFIX = "base_model.model."


def save_adapter(build: Build, folder: Path, classes: dict[int, str] | None = None) -> None:
    """Write what a build trains as an adapter of `peft`, with its base named: the stored model that the recipe names,
    or one that is written beside it, dequantized where it is quantized."""
    folder.mkdir(parents=True, exist_ok=True)
    head = [name for name, _ in classifier_head(build)]
    source = None if build.own_model else resolve_source(build.recipe)
    stored = source is not None and source.kind in ("folder", "hub") and build.recipe.pretrained
    base = folder / BASE
    if stored:
        assert source is not None
        named = str(Path(source.name).resolve()) if source.kind == "folder" else source.name
        if classes and isinstance(build.model, PreTrainedModel):
            name_classes(build.model, classes)
            build.model.config.save_pretrained(folder)
    else:
        named = str(base.resolve())
        save_model(build.model, base, classes)
    write_tensors(_tensors(build.model), folder / TENSORS)
    technique: Any = build.recipe.trainable
    config = {
        "peft_type": "LORA", "task_type": build.task.peft_task, "base_model_name_or_path": named,
        "inference_mode": True, "r": technique.rank, "lora_alpha": technique.alpha, "lora_dropout": technique.dropout,
        "use_rslora": technique.rslora, "use_dora": technique.learns_lengths, "bias": "none",
        "target_modules": _target_names(build.model), "modules_to_save": head or None,
        "fan_in_fan_out": any(isinstance(layer, FrozenConv1D) for _, layer in frozen_layers(build.model)),
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Trained tensors by peft's names."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner, _, last = name.rpartition(".")
            found[f"{PREFIX}{owner}.{NAMES.get(last, last)}"] = parameter.detach()
    return found


def _target_names(model: nn.Module) -> list[str]:
    """The names of the layers that were added to: their last parts, where those mean no other layer."""
    targets = {name for name, layer in frozen_layers(model) if layer.added is not None}
    last = {name.rpartition(".")[2] for name in targets}
    meant = {name for name, module in model.named_modules()
             if isinstance(module, LINEAR) and name.rpartition(".")[2] in last}
    return sorted(last if meant == targets else targets)


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
    elif recipe.base.quantizes:
        notes.append(f"the weights were held in {recipe.base.name}, beside which the adapter was trained: they are "
                     f"written dequantized, as {recipe.base.format(recipe)}")
    build = bare_build(recipe, cpu, torch.device("cpu"))
    for technique in (recipe.base, recipe.trainable):
        build = APPLY[type(technique)](technique, build)
    try:
        tensors = load_file(adapter / TENSORS)
    except Exception as error:  # safetensors and the file system each raise their own
        raise CheckpointError(f"{adapter / TENSORS}: {' '.join(str(error).split())}") from None
    live = _tensors(build.model)
    if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in live.items()}:
        raise CheckpointError(f"{adapter}: the adapter is of another model than {recipe.model}, or of another rank "
                              "than the run's recipe says")
    with torch.no_grad():
        for name, parameter in live.items():
            parameter.copy_(tensors[name])
    dtype = getattr(torch, recipe.base.format(recipe))
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
    except (OSError, ValueError, KeyError):
        return None
    return {int(number): name for number, name in named.items()}

"""An adapter as a folder that `peft` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tightfit.backends.base import DrawnAtRandom
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.checkpoints import write_tensors
from tightfit.backends.pytorch.models import stored_source
from tightfit.backends.pytorch.saved_model import name_classes, save_model
from tightfit.backends.pytorch.switches import as_loaded
from tightfit.backends.pytorch.techniques.adapters.layers import FACTORS, LINEAR, frozen_layers
from tightfit.errors import CheckpointError, one_line, shown
from tightfit.files import final_path
from tightfit.tasks import TASKS

CONFIG, TENSORS, BASE = "adapter_config.json", "adapter_model.safetensors", "base"
"""Files of an adapter's folder, and the folder inside it for a model that is stored nowhere else."""
NAMES = dict(zip(FACTORS, ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"), strict=True))
"""peft's names of a layer's factors."""
PREFIX = "base_model.model."


def save_adapter(build: Build, folder: Path, classes: dict[int, str] | None = None) -> None:
    """Write what a build trains as an adapter of `peft`, with its base named: the stored model that the recipe names
    where it lacks nothing but the head and nothing of it was overridden but dropout, or one that is written beside it,
    dequantized where it is quantized. The first process writes."""
    if build.world.rank:
        return
    folder.mkdir(parents=True, exist_ok=True)
    head = [name for name, _ in classifier_head(build)]
    drawn = [name for note in build.notes if isinstance(note, DrawnAtRandom) for name in note.names]
    whole = all(name.partition(".")[0] in head for name in drawn)
    whole = whole and all("drop" in field for field in build.recipe.model_overrides)
    source = stored_source(build.recipe) if whole and not build.own_model else None
    base = folder / BASE
    if source is not None:
        named = str(Path(source.name).resolve()) if source.kind == "folder" else source.name
        if classes and isinstance(build.model, PreTrainedModel):
            name_classes(build.model, classes)
            with as_loaded(build.model):
                build.model.config.save_pretrained(folder)
    else:
        named = str(final_path(base.resolve()))
        save_model(build.model, base, classes)
    write_tensors(adapter_tensors(build.model), folder / TENSORS)
    technique: Any = build.recipe.trainable
    config = {
        **_arithmetic(build), "task_type": build.task.peft_task, "base_model_name_or_path": named,
        "inference_mode": True, "lora_dropout": technique.dropout, "bias": "none",
        "target_modules": _target_names(build.model), "modules_to_save": head or None,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _arithmetic(build: Build) -> dict[str, Any]:
    """The part of an adapter's configuration that says what is computed of its tensors."""
    technique: Any = build.recipe.trainable
    return {
        "peft_type": "LORA", "r": technique.rank, "lora_alpha": technique.alpha, "use_rslora": technique.rslora,
        "use_dora": technique.learns_magnitude,
        "fan_in_fan_out": any(layer.transposed for _, layer in frozen_layers(build.model)),
    }  # fmt: skip


def load_adapter(build: Build, folder: Path) -> None:
    """Give a build's adapter the tensors that `save_adapter` wrote. Raises CheckpointError for a folder that is
    damaged, or of another adapter."""
    try:
        tensors = load_file(folder / TENSORS)
    except Exception as error:  # safetensors and the file system each raise their own
        raise CheckpointError(f"{folder / TENSORS}: {' '.join(str(error).split())}") from None
    live, expected = adapter_tensors(build.model), _arithmetic(build)
    if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in live.items()}:
        raise CheckpointError(f"{folder}: the adapter is of another model than {build.recipe.model}, or of another "
                              "rank than the run's recipe says")
    if wrong := [name for name, t in tensors.items() if not (t.is_floating_point() and t.isfinite().all())]:
        raise CheckpointError(f"{folder / TENSORS}: {wrong[0]} holds values that are no finite numbers; bring the file "
                              "back as the run wrote it, or train again from a checkpoint")
    try:
        read = json.loads((folder / CONFIG).read_text("utf-8"))
        found = read if isinstance(read, dict) else {}
        wrong = [f"{name} is {shown(found.get(name))}" for name in expected if found.get(name) != expected[name]]
    except (OSError, ValueError, RecursionError) as error:
        wrong = [one_line(error)]
    if wrong:
        raise CheckpointError(f"{folder / CONFIG}: not as the run wrote it ({', '.join(wrong)}); bring it back, with "
                              f"{json.dumps(expected)} in it")
    for name, tensor in live.items():
        tensor.copy_(tensors[name])


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
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


def classifier_head(build: Build) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a classifier that are drawn anew for its classes, by name: what stands beside its backbone."""
    backbone = getattr(build.model, "base_model_prefix", "")
    if TASKS[build.recipe.task].predicts == "class" and backbone:
        yield from ((name, child) for name, child in build.model.named_children()
                    if name != backbone and any(True for _ in child.parameters()))

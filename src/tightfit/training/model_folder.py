"""The finished model's folder: the tokenizer or image processor beside its weights, and how others load it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tightfit.data import Prepared
from tightfit.data.tokenizing import GENERATION, name_end
from tightfit.errors import install_command
from tightfit.models import OUR_TRANSFORMER
from tightfit.recipe import Recipe
from tightfit.tasks import get_task


def finish_model(model: Path, recipe: Recipe, data: Prepared) -> None:
    """Write beside the model what its inputs are made with: the tokenizer, or the image processor."""
    if data.tokenizer is not None:
        data.tokenizer.save(model)
        if get_task(recipe.task).generates:
            if not (model / "config.json").exists():  # of an adapter, whose merged model is to stop there
                (model / GENERATION).write_text("{}", encoding="utf-8")
            name_end(model, data.tokenizer.end_id, data.turn_end)
    if data.image_processor is not None:
        written = json.dumps(data.image_processor, indent=2)
        (model / "preprocessor_config.json").write_text(written + "\n", encoding="utf-8")


def loaded_by(model: Path, recipe: Recipe) -> str | None:
    """A line on how others load the model; None where nothing but tightfit does."""
    task, adapter = get_task(recipe.task), _values(model / "adapter_config.json")
    if adapter:
        classes = f", num_labels={recipe.num_labels}" if recipe.num_labels else ""  # of which the base may have others
        call = f"PeftModel.from_pretrained(<its base model{classes}>, {str(model)!r})"
        if task.peft_class is not None and adapter.get("base_model_name_or_path"):
            call = f"{task.peft_class}.from_pretrained({str(model)!r}{classes})"
        install = "" if find_spec("peft") else f"; {install_command('peft')}"
        base = recipe.frozen_base
        held = f"; it was trained on weights in {base.name}, which peft does not quantize by itself" * base.quantizes
        return f"the adapter loads with peft: {call}{install}{held}"
    if _values(model / "config.json").get("model_type", OUR_TRANSFORMER) == OUR_TRANSFORMER:
        return None
    return f"the model loads with transformers: {task.auto_class}.from_pretrained({str(model)!r})"


def _values(file: Path) -> dict[str, Any]:
    """A JSON file's values; none where it is not there or cannot be read."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}

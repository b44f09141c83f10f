"""Defaults that a recipe takes from its model, named or the caller's own: the task, the data, and the learning rate of
weights that were trained before."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tightfit.bundled import BUNDLED, HUB_NAMES
from tightfit.errors import RecipeError
from tightfit.models import GIVEN_MODULE, HUB_ID, cached_file
from tightfit.tasks import TASKS

TASK_OF_CLASS = (
    ("ForCausalLM", "causal-lm"), ("LMHeadModel", "causal-lm"), ("ModelWithLMHead", "causal-lm"),
    ("ForMaskedLM", "masked-lm"), ("ForPreTraining", "masked-lm"), ("MTModel", "seq2seq"),
    ("ForSequenceClassification", "sequence-classification"), ("ForImageClassification", "image-classification"),
)  # fmt: skip
"""Parts of the names of transformers' classes, and the task of each."""
TASK_OF_FIELD = {"label": "sequence-classification", "target": "seq2seq"}
"""Fields of `data` that one task of texts alone reads, and that task."""
FINE_TUNING_RATE = 2e-5
"""Learning rate of all weights of a model that was trained before: trl's SFTConfig has it as its default."""
TASK_HEAD = re.compile(r"For[A-Z]|DoubleHeadsModel")
"""Pattern in the names of transformers' classes that have a task head."""


def brings_weights(values: Mapping[str, Any], module: Any = None) -> bool:
    """Whether the model of a recipe's values, or the caller's module in its place, was trained before: one of a folder
    or of the Hugging Face hub."""
    if module is not None:
        return bool(getattr(getattr(inner_module(module), "config", None), "_name_or_path", ""))
    name = values.get("model")
    if not isinstance(name, str) or name in BUNDLED or values.get("pretrained") not in (None, True):
        return False
    with suppress(OSError, ValueError, RuntimeError):  # of text that is no name, which is said where the model is read
        return name in HUB_NAMES or bool(HUB_ID.fullmatch(name)) or Path(name).expanduser().is_dir()
    return False


def with_defaults(values: dict[str, Any], module: Any = None) -> dict[str, Any]:
    """A recipe's values with what its model, or the caller's module in its place, says where they say nothing: the
    task (`with_task`), and a learning rate for weights that were trained before and all are trained further."""
    values = with_task(values, module)
    every = values.get("trainable", "all") in ("all", {"name": "all"})
    return {"learning_rate": FINE_TUNING_RATE, **values} if every and brings_weights(values, module) else values


def with_task(values: dict[str, Any], module: Any = None) -> dict[str, Any]:
    """A recipe's values with the task that a field of their data, or else their model, or the caller's module in its
    place, is for, where they name none; and with random data where they name none either and the usual text does not do
    for that task. A module has its head already, and pictures stay pictures.

    Raises RecipeError for a model whose head is of no task.
    """
    if module is not None:
        values = {**values, "model": GIVEN_MODULE}
    model = values.get("model")
    if "task" in values:
        return values
    task = task_of_module(module) if module is not None else task_of(model) if isinstance(model, str) else None
    data = values.get("data", {})
    fields = data if isinstance(data, Mapping) else {}
    if task is None or (module is None and TASKS[task].reads == "tokens"):
        written = {*fields, *(("label",) if values.get("num_labels") is not None else ())}  # a classifier's as well
        task = next((each for field, each in TASK_OF_FIELD.items() if field in written), task)
    if task is None:
        return values
    values = {**values, "task": task}
    if module is None and task in ("seq2seq", "image-classification") and isinstance(data, Mapping):
        values["data"] = {"source": "dummy", **data}  # the standard library's source has no pairs and no pictures
    return values


def task_of(name: str) -> str | None:
    """The task of a bundled model, or that the saved one in a folder, or in the Hugging Face cache under that id, was
    made for; None where its configuration does not say. Raises RecipeError for a head of no task."""
    if name in BUNDLED:
        return BUNDLED[name].task
    try:
        folder = Path(name).expanduser()
        cached = cached_file(name, "config.json") if HUB_ID.fullmatch(name) and not folder.is_dir() else None
        path = folder / "config.json" if folder.is_dir() else cached
        saved = json.loads(path.read_text("utf-8")) if path is not None else {}
    except (OSError, ValueError, RuntimeError):  # of text that is no name, or nested too deep
        return None  # which is said where the model is read
    if not isinstance(saved, dict):
        return None
    classes = saved.get("architectures")
    if not classes and "image_size" in saved and "vocab_size" not in saved:
        return "image-classification"
    wanted = str(classes[0]) if isinstance(classes, list) and classes else ""
    task = _task_of_class(wanted, bool(saved.get("is_encoder_decoder")))
    if task is None and TASK_HEAD.search(wanted):
        raise RecipeError(f"task: {name!r} was saved as {wanted}, whose head is of no task here; for a new head on "
                          f"its body, write task={' or '.join(TASKS)}")
    return task


def task_of_module(module: Any) -> str | None:
    """The task that a module's class, or the first of those that it is made from, is for; None for a class of another
    kind. Raises RecipeError for a class of transformers' with a head of no task."""
    module = inner_module(module)
    config = getattr(module, "config", None)
    for each in type(module).__mro__ if config is not None else ():
        task = _task_of_class(each.__name__, getattr(config, "is_encoder_decoder", False))
        if task is not None:
            return task
        if each.__module__.startswith("transformers") and TASK_HEAD.search(each.__name__):
            raise RecipeError(f"task: the head of {each.__name__} is of no task here; give a module of another class, "
                              "such as one that ends in ForCausalLM, or, where its logits are what a task asks for, "
                              f"write task={' or '.join(TASKS)}")
    return None


def inner_module(module: Any) -> Any:
    """The module inside what torch.compile and peft put around one; itself where nothing is around it."""
    module = getattr(module, "_orig_mod", module)
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def _task_of_class(name: str, encodes_and_decodes: bool) -> str | None:
    """The task that a class of transformers' was made for."""
    if name.endswith("ForConditionalGeneration"):  # of pictures and text, text is the part that a recipe trains
        return "seq2seq" if encodes_and_decodes else "causal-lm"
    return next((task for part, task in TASK_OF_CLASS if part in name), None)

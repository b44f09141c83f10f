"""Finding a recipe: a YAML file, a bundled recipe's name, or a model's: bundled, a folder, a hub's id, a factory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.bundled import BUNDLED, bundled_recipes, refusal_of
from tightfit.errors import RecipeError, UnknownRecipe, closest, cut, nearest, shown
from tightfit.model_facts import model_facts
from tightfit.models import FACTORY, HUB_ID
from tightfit.recipe.schema import Recipe
from tightfit.recipe.yaml import apply_overrides, read_yaml

if TYPE_CHECKING:
    from transformers import TrainingArguments

IF_CUDA = "if_cuda"
"""A recipe file's mapping of fields that take another value on a CUDA device; what is written on the command line
stands above it."""

ARCHITECTURES = (
    ("ForCausalLM", "causal-lm"), ("LMHeadModel", "causal-lm"), ("ForMaskedLM", "masked-lm"),
    ("ForPreTraining", "masked-lm"), ("ForSequenceClassification", "sequence-classification"),
    ("ForImageClassification", "image-classification"), ("ForConditionalGeneration", "seq2seq"),
)  # fmt: skip
"""Endings of transformers' classes, and the task of each."""
RECIPES = ("a YAML file, a bundled recipe or model, a model's folder, its Hugging Face id or package.module:factory; "
           "tightfit recipes lists what is bundled")
"""The names that a recipe may have, for messages."""


def load_recipe(
    name: str | None, overrides: Iterable[str] = (), *, cuda: bool = False, training_arguments: Path | None = None
) -> Recipe:
    """The recipe of that name with `key=value` overrides. Raises RecipeError for an unknown one.

    cuda: whether it is to run on a CUDA device.
    training_arguments: a JSON file of Hugging Face's TrainingArguments, with which no name is needed. What it says
        stands above the recipe's file, and `overrides` above both.
    """
    if name is None and training_arguments is None:
        raise RecipeError(f"RECIPE is missing: {RECIPES}")
    values = {} if name is None else recipe_values(name)
    on_cuda = values.pop(IF_CUDA, {})
    if not isinstance(on_cuda, dict):
        raise RecipeError(f"{IF_CUDA}: {shown(on_cuda)} should be a mapping of fields to values")
    for field in on_cuda:
        if str(field) not in Recipe.model_fields:
            raise RecipeError(f"{IF_CUDA}.{cut(str(field))}: not a field; {nearest(str(field), Recipe.model_fields)}")
    if cuda:
        values = {**values, **on_cuda}
    if training_arguments is None:
        fields = _with_task(apply_overrides(values, overrides))
        recipe = Recipe.from_dict(fields)  # first: to read the model's configuration takes seconds
        return recipe if "seq_len" in fields else Recipe.from_dict({**fields, **_shorter(name, fields)})
    from tightfit.recipe.hf_arguments.table import arguments_of

    values = {**values, **_shorter(name, values)}
    fields = apply_overrides({field: v for field, v in values.items() if not arguments_of(field)}, overrides)
    if "model" not in fields:
        raise RecipeError("model: training arguments do not say which; name it in front of --training-args, or write "
                          "model=gpt2")
    return Recipe.from_training_arguments(training_arguments, **_with_task(fields))


def check_model(model: Any) -> None:
    """Raise RecipeError for what is neither a module nor a model's name, nor None."""
    is_module = callable(getattr(model, "named_parameters", None)) and not isinstance(model, type)
    if model is not None and not isinstance(model, str) and not is_module:
        what = model.__name__ if isinstance(model, type) else type(model).__name__
        raise RecipeError(f"model: {what} is neither a torch module nor the name of a model; give a module that is "
                          "built, or a name such as 'gpt2', and a recipe behind it")


def as_recipe(
    recipe: Recipe | Mapping[str, Any] | str | Path | TrainingArguments | None, model: Any = None,
    overrides: Iterable[str] = (), *, cuda: bool = False, training_arguments: Path | None = None,
) -> Recipe:  # fmt: skip
    """The recipe that a caller means: one, its fields, its name, or TrainingArguments; a model given by name replaces
    the recipe's.

    overrides: `key=value` words on top of TrainingArguments, or of a recipe that is given by name. cuda: whether it is
    to run on a CUDA device, where a named recipe may differ. training_arguments: as of `load_recipe`, beside a name.
    Raises RecipeError.
    """
    check_model(model)
    named = {"model": model} if isinstance(model, str) else {}
    words = list(overrides)
    if training_arguments is not None and not isinstance(recipe, str | Path):
        raise RecipeError(f"training_arguments: {training_arguments} goes with a recipe's name; give TrainingArguments "
                          "as the recipe, or Recipe.from_training_arguments(file, field=value)")
    if words and (recipe is None or isinstance(recipe, Recipe | Mapping)):
        raise RecipeError(f"overrides: {words[0]!r} goes with a recipe's name, or with TrainingArguments; write it "
                          "into the recipe")
    if isinstance(recipe, Recipe):
        return recipe.override(**named) if named else recipe
    if recipe is None:
        return load_recipe(named["model"], cuda=cuda) if named else Recipe()
    if isinstance(recipe, Mapping):
        return Recipe.from_dict(_with_task({**recipe, **named}, model))
    if isinstance(recipe, str | Path):
        replaced = [f"{field}={value}" for field, value in named.items()]
        return load_recipe(str(recipe), [*words, *replaced], cuda=cuda, training_arguments=training_arguments)
    if hasattr(recipe, "per_device_train_batch_size"):
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)  # of a module
        length = {"seq_len": positions} if positions and positions < Recipe().seq_len else {}
        return Recipe.from_training_arguments(recipe, **_with_task(apply_overrides({**named, **length}, words), model))
    raise RecipeError(f"recipe: {type(recipe).__name__} is not a Recipe, a mapping, TrainingArguments, or a recipe "
                      "file's name")


def name_and_overrides(words: Sequence[str]) -> tuple[str, list[str]]:
    """A command's words as a recipe's name and its overrides. Where the first word is an override already, the name is
    that of the model which one of them gives. Raises RecipeError where none does."""
    field = words[0].partition("=")[0].partition(".")[0]
    if "=" not in words[0] or field not in Recipe.model_fields:
        return words[0], list(words[1:])
    model = next((word.partition("=")[2] for word in reversed(words) if word.startswith("model=")), "")
    if not model:
        raise RecipeError(f"RECIPE is missing before {words[0]}; write a model too, such as model=gpt2, or first "
                          f"{RECIPES}")
    return model, list(words)


def recipe_values(name: str) -> dict[str, Any]:
    """The plain values that a recipe's name or path stands for."""
    path = Path(name)
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise RecipeError(f"{name[:40]!r}... is not a recipe: {getattr(error, 'strerror', None) or error}") from None
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            near = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
            hint = nearest(str(path), near) if near else "no recipe file is in that folder"
            raise RecipeError(f"{name}: no such recipe file; {hint}")
        try:
            return read_yaml(path.read_text(encoding="utf-8"), name)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{name}: cannot be read as text ({error})") from None
    bundled = bundled_recipes()
    if name in bundled:
        return read_yaml(bundled[name].read_text(encoding="utf-8"), name)
    if name in BUNDLED:
        return _for_model(name, BUNDLED[name].task)
    if (path / "config.json").is_file():
        return _for_model(name, task_of(name) or Recipe.model_fields["task"].default)
    if exists:
        instead = f"a model's folder is named by model={name}"
        if path.suffix == ".json":
            instead = (f"TrainingArguments go behind a model: tightfit plan MODEL --training-args {name}, which with "
                       "--save mine.yaml writes their recipe")
        raise RecipeError(f"{name}: a recipe file's name ends in .yaml; {instead}")
    if HUB_ID.fullmatch(name) or FACTORY.fullmatch(name):
        return {"model": name}
    if reason := refusal_of(name):
        raise UnknownRecipe(f"model: {name!r} {reason}; write another model")
    raise UnknownRecipe(f"{name!r} is not a recipe; {recipe_hint(name) or f'write {RECIPES}'}")


def recipe_hint(name: str, also: Iterable[str] = ()) -> str:
    """A suggestion for a name that no recipe has: one close to it, of a recipe or in `also`; empty where
    nothing is close."""
    close = closest(name, [*bundled_recipes(), *BUNDLED, *also])
    return "" if close is None else f"did you mean {close!r}?"


def task_of(name: str) -> str | None:
    """The task that the saved model in a folder, or in the Hugging Face cache under that id, was made for; None where
    its configuration does not say."""
    folder = os.path.expanduser(name)  # noqa: PTH111 - these take any text
    path: Any = Path(folder) / "config.json"
    if not os.path.isdir(folder):  # noqa: PTH112
        if not HUB_ID.fullmatch(name):
            return None
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(name, "config.json")
    try:
        saved = json.loads(Path(path).read_text("utf-8")) if isinstance(path, str | Path) else {}
    except (OSError, ValueError, RecursionError):
        return None  # which is said where the model is read
    if not isinstance(saved, dict):
        return None
    classes = saved.get("architectures")
    if not classes and "image_size" in saved and "vocab_size" not in saved:
        return "image-classification"
    return _task_of_class(" ".join(map(str, classes)) if isinstance(classes, list) else "",
                          bool(saved.get("is_encoder_decoder")))


def _task_of_class(name: str, encodes_and_decodes: bool) -> str | None:
    """The task that a class of transformers' was made for."""
    return next((task for ending, task in ARCHITECTURES
                 if name.endswith(ending) and (task != "seq2seq" or encodes_and_decodes)), None)


def _with_task(values: dict[str, Any], module: Any = None) -> dict[str, Any]:
    """A recipe's values with the task that its model was saved for, or that the caller's module is of a class for,
    where they name none."""
    model, task = values.get("model"), None
    if "task" not in values and hasattr(module, "config"):
        task = _task_of_class(type(module).__name__, getattr(module.config, "is_encoder_decoder", False))
    elif "task" not in values and isinstance(model, str):
        task = task_of(model)
    return values if task is None else {**values, "task": task}


def _for_model(name: str, task: str) -> dict[str, Any]:
    """A recipe for a model whose configuration is on this machine."""
    no_data = task in ("seq2seq", "image-classification")  # the standard library's source has no pairs and no pictures
    return {"model": name, "task": task, **({"data": "dummy"} if no_data else {})}


def _shorter(name: str | None, values: dict[str, Any]) -> dict[str, int]:
    """The `seq_len` that a model's positions allow, where that is less than the default; empty for what `name` names
    else. values: those of `_for_model`."""
    if values.get("model") != name or name is None or not (name in BUNDLED or Path(name).is_dir()):
        return {}
    positions = model_facts(Recipe.from_dict(values)).max_positions
    return {"seq_len": positions} if positions and positions < Recipe.model_fields["seq_len"].default else {}

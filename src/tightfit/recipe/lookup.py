"""Finding a recipe: a YAML file, a bundled recipe's name, or a model's: bundled, a folder, a hub's id, a factory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.bundled import BUNDLED, bundled_recipes, refusal_of
from tightfit.errors import RecipeError, UnknownRecipe, closest, cut, nearest, shown
from tightfit.model_facts import facts_of, model_facts
from tightfit.models import FACTORY, HUB_ID
from tightfit.recipe.model_defaults import with_defaults, with_task
from tightfit.recipe.schema import Recipe
from tightfit.recipe.yaml import apply_overrides
from tightfit.recipe.yaml_text import read_yaml

if TYPE_CHECKING:
    from transformers import TrainingArguments

IF_CUDA = "if_cuda"
"""A recipe file's mapping of fields that take another value on a CUDA device; what is written on the command line
stands above it."""

RECIPES = ("a YAML file, a bundled recipe or model, a model's folder, its Hugging Face id or package.module:factory; "
           "tightfit recipes lists what is bundled")
"""The names that a recipe may have, for messages."""


def load_recipe(
    name: str | None, overrides: Iterable[str] = (), *, cuda: bool = False, training_arguments: Path | None = None,
    module: Any = None,
) -> Recipe:  # fmt: skip
    """The recipe of that name with `key=value` overrides. Raises RecipeError for an unknown one.

    cuda: whether it is to run on a CUDA device, where training arguments' `use_cpu` says nothing.
    training_arguments: a file of Hugging Face's TrainingArguments, with which no name is needed. What it says
        stands above the recipe's file, and `overrides` above both.
    module: the caller's own, in place of the recipe's model.
    """
    if name is None and training_arguments is None:
        raise RecipeError(f"RECIPE is missing: {RECIPES}")
    overrides = _steps_or_epochs(list(overrides))
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
        fields = with_defaults(apply_overrides(values, overrides), module)
        return _shorter(Recipe.from_dict(fields), fields, name)
    from tightfit.recipe.hf_arguments.reading import left_by_arguments

    fields = apply_overrides(left_by_arguments(values, training_arguments), overrides)
    if "model" not in fields:
        raise RecipeError("model: training arguments do not say which; name it in front of --training-args, or write "
                          "model=gpt2")
    fields = with_task({**_on_cuda(cuda), **fields}, module)
    return _shorter(Recipe.from_training_arguments(training_arguments, **fields), fields, name, module)


def _steps_or_epochs(overrides: list[str]) -> list[str]:
    """The overrides, whose `max_steps` takes the place of a file's `num_train_epochs`. Raises RecipeError for both."""
    written = dict(text.partition("=")[::2] for text in overrides)
    if "max_steps" not in written:
        return overrides
    if written.get("num_train_epochs", "null") not in ("", "null"):
        raise RecipeError(f"max_steps: {written['max_steps']} steps and num_train_epochs={written['num_train_epochs']} "
                          "are two lengths of one run; write one of them")
    return ["num_train_epochs=null", *overrides]


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
    module = None if named else model
    if isinstance(recipe, Recipe):
        fields = recipe.model_dump(mode="json", exclude_unset=True)
        found = with_defaults({**fields, **named}, module)
        return recipe if found == fields else Recipe.from_dict(found)
    if recipe is None:
        return load_recipe(named["model"], cuda=cuda) if named else Recipe.from_dict(with_defaults({}, module))
    if isinstance(recipe, Mapping):
        return Recipe.from_dict(with_defaults({**recipe, **named}, module))
    if isinstance(recipe, str | Path):
        replaced = [f"{field}={value}" for field, value in named.items()]
        return load_recipe(str(recipe), [*words, *replaced], cuda=cuda, training_arguments=training_arguments,
                           module=module)
    if hasattr(recipe, "per_device_train_batch_size"):
        fields = with_task({**_on_cuda(cuda), **apply_overrides(named, words)}, module)
        return _shorter(Recipe.from_training_arguments(recipe, **fields), fields, named.get("model"), module)
    raise RecipeError(f"recipe: {type(recipe).__name__} is not a Recipe, a mapping, TrainingArguments, or a recipe "
                      "file's name")


def _on_cuda(cuda: bool) -> dict[str, Any]:
    """Fields that stand above training arguments on a CUDA device: `use_cpu` is ignored there, for on a machine without
    a GPU TrainingArguments(bf16=True) cannot be made without it."""
    return {"device": "auto"} if cuda else {}


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
            hint = "it is a folder" if path.is_dir() else hint
            raise RecipeError(f"{name}: no such recipe file; {hint}")
        try:
            return read_yaml(path.read_text(encoding="utf-8"), name)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{name}: cannot be read as text ({error})") from None
    bundled = bundled_recipes()
    if name in bundled:
        return read_yaml(bundled[name].read_text(encoding="utf-8"), name)
    if name in BUNDLED or (path / "config.json").is_file():
        return {"model": name}
    if exists:
        instead = f"text to train on is named by data={name}"
        if (path / "adapter_config.json").is_file():
            instead = ("it holds an adapter alone; tightfit export RUN --merge writes the whole model, to "
                       "train on with that folder's name")
        elif path.is_dir():
            instead = f"a model's folder holds config.json, which is not there; {instead}"
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


def _shorter(recipe: Recipe, fields: Mapping[str, Any], name: str | None, module: Any = None) -> Recipe:
    """The recipe with the `seq_len` that its model's positions allow, where `fields` name none, arguments none but the
    default, and that is less; of the caller's module, and else of a model on this machine that `name` names."""
    if "seq_len" in fields or recipe.seq_len != Recipe.model_fields["seq_len"].default:
        return recipe  # to read a model's configuration takes seconds
    if module is not None:
        positions = facts_of(getattr(module, "config", None), recipe).max_positions
    elif recipe.model == name and (name in BUNDLED or Path(name).is_dir()):
        positions = model_facts(recipe).max_positions
    else:
        return recipe
    return recipe.model_copy(update={"seq_len": positions}) if positions and positions < recipe.seq_len else recipe

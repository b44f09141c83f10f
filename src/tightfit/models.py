"""The model that a recipe names: bundled shapes as plain numbers, Hugging Face configurations, factories.

No framework is loaded when this module is imported; building the model from its source is the backend's work.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from tightfit.bundled import BUNDLED, HUB_NAMES, refusal_of
from tightfit.errors import ModelError, nearest, one_line
from tightfit.tasks import TASKS

if TYPE_CHECKING:
    from tightfit.recipe import Recipe

ONE_CLASS = "single_label_classification"
"""The `problem_type` of a configuration that tasks of one class have; others are regression and several labels."""
OUR_TRANSFORMER = "tightfit-transformer"
"""The `model_type` written into the configuration of a saved `TransformerConfig` model."""


@pydantic_dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class TransformerConfig:
    """The shape of the bundled `transformer-156m`: a pre-norm transformer with learned positions, each of whose
    layers runs its feed-forward block before its attention block. Sizes are in features, tokens or layers."""

    vocab_size: PositiveInt = 2048
    hidden_size: PositiveInt = 1024
    num_layers: PositiveInt = 12
    head_dim: PositiveInt = 128
    num_heads: PositiveInt = 8
    mlp_expansion: PositiveInt = 4
    """Width of the feed-forward block, in hidden sizes."""
    max_seq_len: PositiveInt = 512
    num_outputs: PositiveInt = 2048
    """Logits of each position; follows `vocab_size` where only that is changed."""
    dropout_rate: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Dropout on what each of a layer's two blocks adds."""
    causal_mask: bool = True
    softmax_dtype: str = "float32"
    """Number format of attention's scores and softmax."""


SIZE_FIELD = re.compile(r"(size|dim|heads?|(?<!window_)layers?|embd|inner|positions|embeddings|d_model|d_ff|d_kv)$")
"""Names of fields that count something of which a model has at least one."""
FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""The form `package.module:factory`."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""A Hugging Face id with an owner."""
GIVEN_MODULE = "module given in Python"
"""The model that the recipe of a caller's own module names."""
OTHER_MODELS = "a folder such as ./my-model, a Hugging Face id such as openai-community/gpt2, or package.module:factory"


class ModelSource(NamedTuple):
    """The source of a model. `name` is the bundled name, the folder, the Hugging Face id, or `module:attribute`."""

    kind: Literal["bundled", "folder", "hub", "factory"]
    name: str


def resolve_source(recipe: Recipe) -> ModelSource:
    """The source that `recipe.model` names; no network is touched. Raises ModelError for a name of no kind."""
    name = recipe.model
    if name == GIVEN_MODULE:
        raise ModelError("model: it was a module given in Python, which a recipe cannot build; run that code again, "
                         "with profile_step=10 for a profile, or write model=package.module:factory")
    if name in BUNDLED:
        return ModelSource("bundled", name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(f"model: the folder {name!r} holds an adapter, and no whole model; write its base's "
                             "folder, or one that tightfit export RUN --merge wrote")
        if not (folder / "config.json").is_file():
            raise ModelError(f"model: the folder {name!r} has no config.json; name a folder that save_pretrained wrote")
        return ModelSource("folder", str(folder))
    if reason := refusal_of(name):
        raise ModelError(f"model: {name!r} {reason}; write another model")
    if FACTORY.fullmatch(name):
        return ModelSource("factory", name)
    if name in HUB_NAMES or HUB_ID.fullmatch(name):
        return ModelSource("hub", name)
    if "/" in name or "\\" in name or name.startswith(("~", ".")):
        raise ModelError(f"model: {name!r} is not a folder; write {OTHER_MODELS}")
    raise ModelError(f"model: {name!r} is not a bundled model ({nearest(name, BUNDLED)}); or write {OTHER_MODELS}")


def cached_file(name: str, file: str) -> Path | None:
    """A file of a model in the hub's cache on this machine; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def own_eos_token(name: str) -> str | None:
    """The token that ends a document by a model's own tokenizer, in its folder or the hub's cache; None where there is
    none, or it says none."""
    path = Path(name).expanduser() / "tokenizer_config.json"
    if not path.is_file() and name not in BUNDLED and (name in HUB_NAMES or HUB_ID.fullmatch(name)):
        path = cached_file(name, path.name) or path
    try:
        token = json.loads(path.read_text("utf-8"))["eos_token"]
        return None if token is None else str(token["content"] if isinstance(token, dict) else token)
    except (OSError, ValueError, LookupError, TypeError):  # not there, not JSON, or without one
        return None


def read_saved_config(folder: Path) -> dict[str, Any]:
    """The values of a saved model's configuration. Raises ModelError where they cannot be read."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model: {str(path)!r} cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ModelError(f"model: {str(path)!r} should hold a JSON object")
    return values


def needs_own_code(saved: dict[str, Any]) -> bool:
    """Whether a saved model's configuration names a class alone, which only its own code can build."""
    return "class" in saved and "model_type" not in saved


def read_config(recipe: Recipe) -> Any:
    """The configuration of the recipe's model, with the recipe's overrides, vocabulary, labels and task written in.

    Returns a `TransformerConfig` or a transformers configuration object; for a factory, which has none to read, its
    keyword arguments as a namespace. Raises ModelError for what cannot be found, read or set.
    """
    source = resolve_source(recipe)
    changes = dict(recipe.model_overrides)
    if source.kind == "factory":
        return SimpleNamespace(**changes)
    own = {"vocab_size": recipe.vocab_size, "num_labels": recipe.num_labels}
    changes |= {field: value for field, value in own.items() if value is not None}
    if source.kind == "bundled":
        bundled = BUNDLED[source.name]
        if bundled.config_class == "transformer":
            return _our_config(dict(bundled.numbers), changes, recipe)
        import transformers

        config_class = getattr(transformers, bundled.config_class)
        return _make_config(config_class(**bundled.numbers), dict(bundled.numbers), changes, recipe)
    saved = read_saved_config(Path(source.name)) if source.kind == "folder" else {}
    if saved.get("model_type") == OUR_TRANSFORMER:
        del saved["model_type"]
        saved.pop("eos_token_id", None)  # which a run writes there for what generates
        return _our_config(saved, changes, recipe)
    if needs_own_code(saved):
        raise ModelError(f"model: {source.name!r} holds the weights of {saved['class']}, which only its own code can "
                         "build; write model: package.module:factory")
    return _stored_config(source.name, changes, recipe)


def _our_config(values: dict[str, Any], changes: dict[str, Any], recipe: Recipe) -> TransformerConfig:
    """values: of a saved model's config.json. changes: what the recipe writes otherwise."""
    if recipe.task not in ("causal-lm", "masked-lm"):
        raise ModelError(f"task: the bundled transformer gives logits for each token, which {recipe.task} does not "
                         "use; write task=causal-lm")
    changes.pop("num_labels", None)
    if "vocab_size" in changes:
        changes.setdefault("num_outputs", changes["vocab_size"])
    if recipe.task == "masked-lm":
        changes.setdefault("causal_mask", False)
    merged = {**values, **changes}
    _check_fields("TransformerConfig", merged, (field.name for field in dataclasses.fields(TransformerConfig)))
    try:
        config = TransformerConfig(**merged)
    except ValidationError as error:
        wrong = [f"model_overrides.{e['loc'][0]}: {e['input']!r} {e['msg'].removeprefix('Input ')}"
                 for e in error.errors()]
        raise ModelError("; ".join(wrong)) from None
    if config.num_outputs < config.vocab_size:
        raise ModelError(f"model_overrides.num_outputs: {config.num_outputs} is less than the vocabulary of "
                         f"{config.vocab_size}; write num_outputs={config.vocab_size} or more")
    return config


def _stored_config(name: str, changes: dict[str, Any], recipe: Recipe) -> Any:
    """The configuration in a folder or on the Hugging Face hub."""
    from transformers import AutoConfig

    from tightfit.hub import explain_hub_error, only_local

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=recipe.trust_remote_code,
                                            local_files_only=only_local(name))
    except Exception as error:  # the hub's client, its transport and remote code each raise their own
        raise ModelError(explain_hub_error(name, error)) from error
    if reason := refusal_of(config.model_type):
        raise ModelError(f"model: {name!r} {reason}; write another model")
    values = config.to_dict()
    layers = changes.get("num_hidden_layers")
    if isinstance(layers, int) and isinstance(values.get("layer_types"), list):
        # One entry for each layer, so a saved list cannot outlive a change of the depth.
        values["layer_types"] = values["layer_types"][:layers] if layers <= len(values["layer_types"]) else None
    return _make_config(config, values, changes, recipe)


def _make_config(config: Any, values: dict[str, Any], changes: dict[str, Any], recipe: Recipe) -> Any:
    """`config`, whose fields come from `values`, made again with the changes and with what the task needs.

    Made again, not set: fields such as the width of a head follow from others.
    """
    config_class, known = type(config), config.to_dict()
    aliases: dict[str, str] = config_class.attribute_map
    _check_fields(config_class.__name__, changes, {**known, **aliases, "num_labels": None, "vocab_size": None})
    for name, value in changes.items():
        if type(value) is int and value < 1 and SIZE_FIELD.search(aliases.get(name, name)):
            raise ModelError(f"model_overrides.{name}: {value} should be 1 or more")
    changes = {aliases.get(name, name): value for name, value in changes.items()}
    num_labels = changes.pop("num_labels", None)
    vocab_size = changes.get("vocab_size")
    if "vocab_size" not in known and "text_config" in known and vocab_size is not None:
        changes["text_config"] = {**known["text_config"], "vocab_size": changes.pop("vocab_size")}
    if vocab_size is not None:
        # Special tokens of the old vocabulary that the new one does not have.
        for name, value in known.items():
            if name.endswith("_token_id") and isinstance(value, int) and value >= vocab_size:
                changes.setdefault(name, None)
    if recipe.task == "causal-lm" and "is_decoder" in known and not known.get("is_encoder_decoder"):
        changes.setdefault("is_decoder", True)  # which makes an encoder such as BERT causal
    if changes:
        try:
            config = config_class.from_dict({**values, **changes})
        except Exception as error:  # the configurations validate with exceptions of several libraries
            raise ModelError(f"model_overrides: {config_class.__name__} refuses {changes}: {one_line(error)}") from None
    if num_labels is not None:
        config.num_labels = num_labels
    _check_task(config, recipe)
    check_classes(config, recipe)
    return config


def _check_task(config: Any, recipe: Recipe) -> None:
    """Raise ModelError where no class of transformers' makes a model of a configuration for the recipe's task."""
    import transformers

    if TASKS[recipe.task].auto_class in (getattr(config, "auto_map", None) or {}):  # of a model with code of its own
        return
    served = [name for name, task in TASKS.items()
              if type(config) in getattr(transformers, task.auto_class)._model_mapping]
    if recipe.task not in served:
        write = " or ".join(f"task={name}" for name in served) or f"another model than {recipe.model!r}"
        raise ModelError(f"task: transformers has no {recipe.task} model of type {config.model_type!r}; write {write}")


def check_classes(config: Any, recipe: Recipe) -> None:
    """Raise ModelError where a model that is to be trained to classify has another loss, by its configuration, than the
    cross-entropy of one class. config: of a module of the caller's own as well."""
    if TASKS[recipe.task].predicts != "class" or recipe.mode != "train":
        return
    problem = getattr(config, "problem_type", None)
    if getattr(config, "num_labels", None) == 1:
        raise ModelError("num_labels: a head of 1 logit is for regression, which is not among the tasks, and "
                         f"{recipe.task} has classes; write num_labels=2 or more, or give a module that is made so")
    if problem not in (None, ONE_CLASS):
        raise ModelError(f"model_overrides.problem_type: {problem!r} is what the model's configuration asks for, and "
                         f"{recipe.task} is trained with the cross-entropy of one class; write "
                         f"model_overrides.problem_type={ONE_CLASS}, or that into the config of a module")


def _check_fields(owner: str, changes: Iterable[str], known: Iterable[str]) -> None:
    names = {name for name in known if not name.startswith("_")}
    for name in changes:
        if name not in names:
            raise ModelError(f"model_overrides.{name}: not a field of {owner}; {nearest(name, names)}")

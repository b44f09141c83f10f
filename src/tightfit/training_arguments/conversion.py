"""The two directions: TrainingArguments to a recipe, and a recipe to TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tightfit.errors import RecipeError
from tightfit.techniques.compile import PerBlock
from tightfit.techniques.loading import Loading
from tightfit.techniques.optimizer import Adafactor
from tightfit.techniques.precision import Bf16Pure
from tightfit.training_arguments.reading import complete, read
from tightfit.training_arguments.table import CARRIED, DEFAULTS, FIELDS, REFUSED, SPELLED
from tightfit.training_arguments.values import recipe_values
from tightfit.training_arguments.writing import applied_slots, plain_arguments, require_settled

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from tightfit.recipe import Recipe

R = TypeVar("R", bound="Recipe")

ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention", "flash-attn": "flash_attention_2"}
"""transformers' `attn_implementation` of each attention."""

SDPA = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}
"""torch.nn.attention.SDPBackend of each kernel."""


def from_training_arguments(
    recipe_type: type[R], source: TrainingArguments | Mapping[str, Any] | str | Path, fields: Mapping[str, Any],
) -> R:  # fmt: skip
    """The recipe that says what the arguments say.

    source: a TrainingArguments, a mapping of its names, or the path of a JSON file that `to_json_string` wrote.
    fields: a recipe's fields that the arguments do not have, such as model and seq_len, or that replace what they say,
        whole: `optimizer` its weight decay too.

    Raises RecipeError naming each argument that a recipe cannot hold, with the reason and what to write.
    """
    written = read(source)
    if isinstance(steps := fields.get("max_steps"), int):
        written["max_steps"] = steps
    if "device" in fields:
        written["use_cpu"] = fields["device"] == "cpu"
    given = complete(written)
    defaults = _defaults(recipe_type)
    replaced = {name for field in fields for name in FIELDS.get(field, ())}
    asked = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "use_cpu")
    consulted = complete({**written, **{name: DEFAULTS[name] for name in replaced.difference(asked)}})
    reasons = [
        f"{name}: {'(hidden)' if name.endswith('_token') else repr(consulted[name])} {reason}"
        for name, (default, reason) in REFUSED.items()
        if consulted[name] != default
    ]
    values, more = recipe_values(consulted, defaults)
    values = {"loss": "plain", **values}  # the Trainer's models make whole logits
    if reasons or more:
        raise RecipeError("; ".join([*reasons, *more]))
    recipe = recipe_type.from_dict({**values, **fields})
    said = complete(plain_arguments(recipe))
    kept = {name: value for name, value in given.items() if name not in replaced and value != said[name]}
    if lost := [name for name in kept if name not in CARRIED and name not in SPELLED]:
        raise RecipeError("; ".join(f"{name}: {given[name]!r} has no place in a recipe; leave it out" for name in lost))
    return recipe_type.from_dict({**values, **fields, "hugging_face": {**kept, **recipe.hugging_face}})


def training_arguments(recipe: Recipe) -> dict[str, Any]:
    """Keyword arguments for transformers.TrainingArguments that say what the recipe says; no framework is imported.

    What no argument can say is in `left_to_you`. Raises RecipeError where a field is still `auto`, and for a global
    batch that is not made of whole micro-batches, which the Trainer's accumulation takes.
    """
    require_settled(recipe)
    micro = recipe.micro_batch_size
    assert micro != "auto"
    if recipe.batch_size % micro:
        fitting = f"batch_size={max(recipe.batch_size // micro, 1) * micro}"
        raise RecipeError(
            f"batch_size: {recipe.batch_size} is no multiple of micro_batch_size {micro}, and the Trainer accumulates "
            f"whole micro-batches only; write {fitting}, or another micro_batch_size"
        )
    arguments = plain_arguments(recipe, applied_slots(recipe))
    arguments |= {name: value for name, value in recipe.hugging_face.items() if name in CARRIED}
    spelled = {name: value for name, value in recipe.hugging_face.items() if name in SPELLED}
    defaults = _defaults(type(recipe))
    meant = recipe_values(complete(arguments), defaults)
    for written in (spelled, *({name: value} for name, value in spelled.items())):
        if recipe_values(complete({**arguments, **written}), defaults) == meant:
            arguments |= written
    return arguments


def left_to_you(recipe: Recipe) -> tuple[str, ...]:
    """What the recipe says and TrainingArguments cannot, as sentences that begin with the fields they are about.

    Raises RecipeError as `training_arguments` does.
    """
    given = training_arguments(recipe)
    assert recipe.attention != "auto"
    assert recipe.optimizer != "auto"
    assert recipe.compile != "auto"
    sentences = [
        f"hugging_face: {name}={value!r} is not given back, for the recipe's own fields say otherwise"
        for name, value in recipe.hugging_face.items()
        if given.get(name, DEFAULTS[name]) != value
    ]
    if recipe.loss != "auto" and recipe.loss.exact != "bitwise":
        sentences.append(f"loss: the Trainer's logits are whole, which {recipe.loss.name} does without; plan with "
                         "loss=plain")
    sentences.append(f"seq_len: give the Trainer rows of at most {recipe.seq_len} tokens")
    if not isinstance(recipe.precision, Bf16Pure):
        sentences.append("model: load it with dtype=torch.float32; by default its weights keep the checkpoint's dtype")
    applied = applied_slots(recipe)
    if applied:
        sentences.append(
            f"{', '.join(applied)}: write applied = tightfit.apply(model, recipe), give the Trainer "
            "model=applied.model and optimizers=(applied.optimizer, None), and train inside `with applied.settings():`"
        )
    else:
        kernel = SDPA.get(getattr(recipe.attention, "kernel", "auto"))
        inside = f", and train inside torch.nn.attention.sdpa_kernel(SDPBackend.{kernel})" if kernel else ""
        implementation = ATTENTION[recipe.attention.name]
        sentences.append(f"attention: load the model with attn_implementation={implementation!r}{inside}")
    if "compile" not in applied and isinstance(recipe.compile, PerBlock):
        sentences.append("compile: set the environment variable ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true; "
                         "without it the whole model is compiled as one")
    if "optimizer" not in applied and isinstance(recipe.optimizer, Adafactor):
        sentences.append("learning_rate: Hugging Face's adafactor takes it as the step itself, and this recipe as "
                         "relative to each matrix's size; choose it anew")
    if plain_arguments(recipe, applied).get("tf32") is False and recipe.hugging_face.get("tf32", False) is None:
        sentences.append("precision: the Trainer turns tf32 on under torch_compile where the GPU has it, and this "
                         "recipe leaves it off; write precision.tf32=true, or take tf32 out of hugging_face")
    if given["max_steps"] == -1:
        epochs = given.get("num_train_epochs", DEFAULTS["num_train_epochs"])
        sentences.append(f"max_steps: the Trainer trains for num_train_epochs={epochs:g}, as hugging_face says, and "
                         f"this recipe for {recipe.max_steps} steps; write another number to have it count steps too")
    if recipe.loading.prefetch != Loading().prefetch and not recipe.loading.workers:
        sentences.append("loading: prefetch has no effect without workers")
    if recipe.device == "cpu" and not recipe.loading.pin_memory:
        sentences.append("loading: pin_memory has no effect on the CPU")
    if recipe.device == "cuda":
        sentences.append("device: the Trainer takes a CUDA device where there is one, and does not insist")
    evaluated = given["per_device_eval_batch_size"]
    if given["eval_strategy"] != "no" and evaluated > given["per_device_train_batch_size"]:
        sentences.append(f"hugging_face: per_device_eval_batch_size={evaluated} is more than the micro-batch, which "
                         "evaluation is planned with")
    if recipe.eval_steps is None and "eval_strategy" not in recipe.hugging_face:
        sentences.append("eval_steps: call trainer.evaluate() after training, where this recipe evaluates")
    if recipe.pad_vocab_to:
        sentences.append(f"pad_vocab_to: call model.resize_token_embeddings(pad_to_multiple_of={recipe.pad_vocab_to})")
    if recipe.pad_sequence_to:
        sentences.append(f"pad_sequence_to: give the data collator pad_to_multiple_of={recipe.pad_sequence_to}")
    return tuple(sentences)


def _defaults(recipe_type: type[Recipe]) -> dict[str, Any]:
    """The recipe's values where arguments have no number."""
    return {name: recipe_type.model_fields[name].default for name in ("max_steps", "save_total_limit", "logging_steps")}

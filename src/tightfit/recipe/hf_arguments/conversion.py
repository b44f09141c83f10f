"""The two directions: TrainingArguments to a recipe, and a recipe to TrainingArguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tightfit.errors import RecipeError
from tightfit.recipe.hf_arguments.reading import SAME, TECHNIQUES, complete, read, recipe_values
from tightfit.recipe.hf_arguments.table import CARRIED, DEFAULTS, REFUSED, SPELLED, arguments_of

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from tightfit.recipe.schema import Recipe

R = TypeVar("R", bound="Recipe")
Arguments = dict[str, Any]

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
    replaced = {name for field in fields for name in arguments_of(field)}
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
    return recipe_type.from_dict({**values, **fields, "hugging_face": {**kept, **recipe.hugging_face}})


def training_arguments(recipe: Recipe) -> Arguments:
    """Keyword arguments for transformers.TrainingArguments that say what the recipe says; no framework is imported.

    What no argument can say is in `left_to_you`. Raises RecipeError where a field is still `auto`, and for a global
    batch that does not divide into whole micro-batches, which the Trainer's accumulation takes.
    """
    open_fields = [field for field in recipe.open_choices() if field != "loss"]  # the Trainer has its own
    open_fields += ["loading.workers"] if recipe.loading.workers == "auto" else []
    if open_fields:
        raise RecipeError(f"{', '.join(open_fields)}: still auto, which TrainingArguments cannot say; plan the recipe "
                          "first, or write a value for each")
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


def plain_arguments(recipe: Recipe, applied: Sequence[str] = ()) -> Arguments:
    """The arguments that the recipe's fields say; none for a field that is still `auto`, or in `applied`."""
    on_cpu = recipe.device == "cpu"
    arguments: Arguments = {
        **{name: getattr(recipe, name) for name in (*SAME, "max_steps", "warmup_steps", "logging_steps")},
        "eval_strategy": "steps" if recipe.eval_steps else "no",
        "eval_steps": recipe.eval_steps,
        "save_strategy": "steps" if recipe.save_steps else "no",
        "save_steps": recipe.save_steps,
        "save_total_limit": recipe.save_total_limit,
        "torch_empty_cache_steps": recipe.empty_cache_steps,
        "report_to": list(recipe.report_to) or "none",
        "use_cpu": on_cpu,
    }
    arguments = {name: value for name, value in arguments.items() if value is not None}
    micro = recipe.micro_batch_size
    if micro != "auto":
        arguments["per_device_train_batch_size"] = arguments["per_device_eval_batch_size"] = micro
        arguments["gradient_accumulation_steps"] = recipe.batch_size // micro
    for slot in TECHNIQUES:
        technique = getattr(recipe, slot)
        if slot not in applied and technique != "auto":
            arguments |= technique.hf_arguments(on_cpu) or {}
    if arguments.get("torch_compile") and recipe.precision != "auto" and "fp16" not in arguments:
        arguments.setdefault("tf32", False)  # which the Trainer otherwise turns on
    return arguments


def applied_slots(recipe: Recipe) -> tuple[str, ...]:
    """The slots that `tightfit.apply` has to make on the model, because one of them is no argument; empty if all are.

    It makes all of a recipe's slots at once, so that the others must not be made by arguments again.
    """
    said = {slot: getattr(recipe, slot).hf_arguments(recipe.device == "cpu") for slot in TECHNIQUES}
    if all(arguments is not None for arguments in said.values()):
        return ()
    made = {"attention", "optimizer", *(slot for slot in ("checkpointing", "compile") if said[slot] != {}),
            *(["precision"] if said["precision"] is None else [])}  # fmt: skip
    return tuple(slot for slot in ("attention", *TECHNIQUES) if slot in made)


def left_to_you(recipe: Recipe) -> tuple[str, ...]:
    """Fields of the recipe that TrainingArguments cannot hold, as sentences that begin with their names.

    Raises RecipeError as `training_arguments` does.
    """
    return tuple(_left_to_you(recipe, training_arguments(recipe)))


def _left_to_you(recipe: Recipe, given: Arguments) -> Iterator[str]:
    assert recipe.attention != "auto"
    assert recipe.precision != "auto"
    for name, value in recipe.hugging_face.items():
        if given.get(name, DEFAULTS[name]) != value:
            yield f"hugging_face: {name}={value!r} is not given back, for the recipe's own fields say otherwise"
    if recipe.loss != "auto" and recipe.loss.exact != "bitwise":
        yield f"loss: the Trainer's logits are whole, which {recipe.loss.name} does without; plan with loss=plain"
    yield f"seq_len: give the Trainer rows of at most {recipe.seq_len} tokens"
    if recipe.precision.weight_rounding is None:
        yield "model: load it with dtype=torch.float32; by default its weights keep the checkpoint's dtype"
    applied = applied_slots(recipe)
    if applied:
        yield (f"{', '.join(applied)}: write applied = tightfit.apply(model, recipe), give the Trainer "
               "model=applied.model and optimizers=(applied.optimizer, None), and train inside `with "
               "applied.settings():`")
    else:
        kernel = SDPA.get(getattr(recipe.attention, "kernel", "auto"))
        inside = f", and train inside torch.nn.attention.sdpa_kernel(SDPBackend.{kernel})" if kernel else ""
        yield f"attention: load the model with attn_implementation={recipe.attention.hf_name!r}{inside}"
    for slot in TECHNIQUES:
        note = getattr(recipe, slot).hf_note
        if slot not in applied and note:
            yield note
    if plain_arguments(recipe, applied).get("tf32") is False and recipe.hugging_face.get("tf32", False) is None:
        yield ("precision: the Trainer turns tf32 on under torch_compile where the GPU has it, and this recipe leaves "
               "it off; write precision.tf32=true, or take tf32 out of hugging_face")
    if given["max_steps"] == -1:
        epochs = given.get("num_train_epochs", DEFAULTS["num_train_epochs"])
        yield (f"max_steps: the Trainer trains for num_train_epochs={epochs:g}, as hugging_face says, and this recipe "
               f"for {recipe.max_steps} steps; write another number to have it count steps too")
    evaluated = given["per_device_eval_batch_size"]
    if given["eval_strategy"] != "no" and evaluated > given["per_device_train_batch_size"]:
        yield (f"hugging_face: per_device_eval_batch_size={evaluated} is more than the micro-batch, which evaluation "
               "is planned with")
    if recipe.eval_steps is None and "eval_strategy" not in recipe.hugging_face:
        yield "eval_steps: call trainer.evaluate() after training, where this recipe evaluates"
    if recipe.pad_vocab_to:
        yield f"pad_vocab_to: call model.resize_token_embeddings(pad_to_multiple_of={recipe.pad_vocab_to})"
    if recipe.pad_sequence_to:
        yield f"pad_sequence_to: give the data collator pad_to_multiple_of={recipe.pad_sequence_to}"


def _defaults(recipe_type: type[Recipe]) -> dict[str, Any]:
    """The recipe's values where arguments have no number."""
    return {name: recipe_type.model_fields[name].default for name in ("max_steps", "save_total_limit", "logging_steps")}

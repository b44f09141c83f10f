"""The two directions: TrainingArguments to a recipe, and a recipe to TrainingArguments."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from tightfit.errors import RecipeError, nearest
from tightfit.metrics import METRICS
from tightfit.models import own_eos_token
from tightfit.recipe.best_metric import reasons_against
from tightfit.recipe.hf_arguments import sft, table
from tightfit.recipe.hf_arguments.reading import read_arguments
from tightfit.recipe.yaml import explain
from tightfit.techniques import SLOTS

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from tightfit.recipe.schema import Recipe

R = TypeVar("R", bound="Recipe")
Arguments = dict[str, Any]

SAME = ("output_dir", "learning_rate", "lr_scheduler_type", "label_smoothing_factor", "max_grad_norm",
        "save_total_limit", "seed", "report_to")
"""Fields of a recipe that are called as their arguments, and mean the same."""

TECHNIQUES = ("precision", "checkpointing", "offload", "compile", "optimizer", "loading")
"""The slots that arguments fill: each variant knows its own arguments."""

NEUTRAL = {"use_reentrant": False, "preserve_rng_state": True, "offload": False}
"""gradient_checkpointing_kwargs that say what is so without them."""

DERIVED_OUTPUT_DIR = "trainer_output"
"""TrainingArguments' own value where no output_dir is given."""


def from_training_arguments(
    recipe_type: type[R], source: TrainingArguments | Mapping[str, Any] | str | Path, fields: Mapping[str, Any],
) -> R:  # fmt: skip
    """The recipe that says what the arguments say, as `Recipe.from_training_arguments` describes it. `fields` replace
    what arguments say, whole: `optimizer` its weight decay too."""
    written, own, reasons = read_arguments(source)
    if own and "model" in fields and own["eos_token"] == own_eos_token(str(fields["model"])):
        own["eos_token"] = None  # which its tokenizer says itself
    said_by_own, unsaid = sft.recipe_values(own, sft.paths(fields))
    reasons += unsaid
    if isinstance(steps := fields.get("max_steps"), int):
        written["max_steps"] = steps
    if "device" in fields:
        written["use_cpu"] = fields["device"] == "cpu"
    try:
        given = _complete(written)
    except RecipeError as error:
        raise RecipeError("; ".join([*reasons, str(error)])) from None
    replaced = {name for field in fields for name in table.arguments_of(field)}
    # What other fields are read from too is read although it is replaced.
    shared = {*table.arguments_of("batch_size"), "max_steps", "use_cpu"}
    consulted = {**written, **{name: table.DEFAULTS[name] for name in replaced - shared}}
    # The Trainer's models make whole logits, and it evaluates on all that it is given.
    recipe = _recipe(recipe_type, consulted, {"loss": "plain", "eval_samples": None},
                     sft.beneath(said_by_own, fields), reasons)
    data, changes = recipe.data, Arguments()
    whole = data is fields.get("data") or "eval_fraction" in data.model_fields_set
    if recipe.eval_steps is None and not whole:  # and trains on all of it
        changes["data"] = {**data.model_dump(exclude_unset=True), "eval_fraction": 0.0}
    said = _complete(plain_arguments(recipe))
    kept = {name: value for name, value in given.items() if name not in replaced and value != said.get(name)}
    return recipe.override(**changes, hugging_face={**kept, **recipe.hugging_face})


def training_arguments(recipe: Recipe) -> Arguments:
    """Keyword arguments for transformers.TrainingArguments that say what the recipe says; no framework is imported.

    Attention is the model's, and so are adapters and a quantized base, which is warned of. Raises RecipeError for a
    loss without whole logits, which the Trainer makes, for another technique that no argument can say, where a field is
    still `auto`, and for a global batch that does not divide into whole micro-batches, which the Trainer's accumulation
    takes.
    """
    open_fields = [field for field in recipe.open_choices() if field != "loss"]
    open_fields += ["loading.workers"] if recipe.loading.workers == "auto" else []
    if open_fields:
        raise RecipeError(f"{', '.join(open_fields)}: still auto, which TrainingArguments cannot say; plan the recipe "
                          "first, or write a value for each")
    on_cpu = recipe.device == "cpu"
    techniques = [technique for slot in (*TECHNIQUES, "loss") if (technique := getattr(recipe, slot)) != "auto"]
    if unsaid := [technique for technique in techniques if technique.hf_arguments(on_cpu) is None]:
        named = ", ".join(f"{technique.slot}={technique.name}" for technique in unsaid)
        other = "loss=plain, whose logits are whole as the Trainer's," if recipe.loss in unsaid else (
            f"{unsaid[0].slot}={SLOTS[unsaid[0].slot][0].name},")
        raise RecipeError(f"{named}: TrainingArguments cannot say it as the recipe does; write {other} call "
                          "tightfit.Trainer, or keep your own loop with tightfit.apply(model, recipe)")
    if recipe.trainable.freezes:
        warnings.warn(f"trainable={recipe.trainable.name} base={recipe.frozen_base.name}: TrainingArguments do not "
                      "say it; hand the Trainer a model that is so already, such as peft's", stacklevel=3)
    if uneven := uneven_batch(recipe):
        raise RecipeError(uneven)
    saves, evaluates = recipe.save_steps, recipe.eval_steps
    together = (isinstance(saves, int | float) and isinstance(evaluates, int | float)
                and (saves < 1) == (evaluates < 1) and round(saves / evaluates, 6) % 1 == 0)
    if recipe.load_best_model_at_end and saves not in (None, "auto", evaluates) and not together:
        raise RecipeError(f"save_steps: {saves} is no multiple of eval_steps {evaluates}, as the "
                          "Trainer wants it with load_best_model_at_end; write one, or save_steps=null")
    arguments = plain_arguments(recipe)
    arguments |= {name: value for name, value in recipe.hugging_face.items() if name in table.CARRIED}
    spelled = {name: value for name, value in recipe.hugging_face.items() if name in table.SPELLED}
    meant = _recipe(type(recipe), arguments)
    for written in (spelled, *({name: value} for name, value in spelled.items())):
        with suppress(RecipeError):  # where it is no longer a spelling of what the recipe says
            if _recipe(type(recipe), {**arguments, **written}) == meant:
                arguments |= written
    return arguments


def uneven_batch(recipe: Recipe) -> str:
    """The reason why the Trainer cannot accumulate a recipe's global batch; empty where it can."""
    micro = recipe.resolved_micro_batch
    if not recipe.batch_size % micro:
        return ""
    return (f"batch_size: {recipe.batch_size} is no multiple of micro_batch_size {micro}, and the Trainer accumulates "
            f"whole micro-batches only; write batch_size={max(recipe.batch_size // micro, 1) * micro}, or another "
            "micro_batch_size")


def _recipe(
    recipe_type: type[R], given: Arguments, below: Mapping[str, Any] = {}, above: Mapping[str, Any] = {},
    reasons: Sequence[str] = (),
) -> R:  # fmt: skip
    """The recipe that arguments mean. below, above: values that theirs replace, and that replace theirs. reasons:
    what is against it already. Raises RecipeError with all reasons against it at once."""
    values, unsaid = _recipe_values(_complete(given))
    against = [*reasons, *unsaid]
    try:
        recipe = recipe_type.from_dict({**below, **values, **above})
    except RecipeError as error:
        against.append(str(error))
    if against:
        raise RecipeError("; ".join(against))
    return recipe


def plain_arguments(recipe: Recipe) -> Arguments:
    """The arguments that the recipe's fields say; none for a field that is still `auto` or that none can say."""
    on_cpu, best = recipe.device == "cpu", recipe.best_metric
    arguments: Arguments = {
        **{name: getattr(recipe, name) for name in (
            *SAME, "num_train_epochs", "warmup_steps", "logging_steps"
        )},
        "lr_scheduler_kwargs": recipe.lr_scheduler_kwargs or None,
        "max_steps": recipe.max_steps if recipe.num_train_epochs is None else -1,
        **_strategy("eval", recipe.eval_steps, "no"),
        **_strategy("save", recipe.save_steps, "best" if recipe.load_best_model_at_end else "no"),
        "load_best_model_at_end": recipe.load_best_model_at_end or None,
        "metric_for_best_model": best,
        "greater_is_better": best and METRICS[best].larger_is_better,
        "torch_empty_cache_steps": recipe.empty_cache_steps,
        "full_determinism": recipe.deterministic or None,
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
        if technique != "auto":
            arguments |= technique.hf_arguments(on_cpu) or {}
    if arguments.get("torch_compile") and recipe.precision != "auto" and "fp16" not in arguments:
        arguments.setdefault("tf32", False)  # which the Trainer otherwise turns on
    return arguments


def _strategy(what: str, every: float | str | None, otherwise: str) -> Arguments:
    """The arguments that say how often a run evaluates or saves; none where that is by time."""
    if isinstance(every, int | float):
        return {f"{what}_strategy": "steps", f"{what}_steps": every}
    if every == "auto":
        return {} if otherwise == "no" else {f"{what}_strategy": otherwise}
    return {f"{what}_strategy": every or otherwise}


def _complete(given: Mapping[str, Any]) -> Arguments:
    """Every argument, with defaults and with what TrainingArguments derives from others, each in one spelling.

    Raises RecipeError for a value of another type.
    """
    a = {**table.DEFAULTS, **given}
    if a["output_dir"] == DERIVED_OUTPUT_DIR:
        a["output_dir"] = None
    if a["report_to"] in (None, [], ["none"], [None]):
        a["report_to"] = "none"
    elif isinstance(a["report_to"], str) and a["report_to"] != "none":
        a["report_to"] = [a["report_to"]]
    for name in ("lr_scheduler_kwargs", "fsdp", "fsdp_config", "deepspeed", "debug", "disable_tqdm"):
        a[name] = a[name] or table.DEFAULTS[name]  # empty, or false, says the same as no value
    usual = {"even_batches": True, "use_seedable_sampler": True}
    for name in ("accelerator_config", "fsdp_config"):
        if isinstance(a[name], Mapping) and all((v or False) == usual.get(k, False) for k, v in a[name].items()):
            a[name] = None  # nothing but Accelerate's own defaults
    if a["torch_compile_mode"] is not None or a["torch_compile_backend"] is not None:
        a["torch_compile"] = True
    if a["torch_compile"] and a["torch_compile_backend"] is None:
        a["torch_compile_backend"] = "inductor"
    if a["eval_strategy"] != "no":
        a["do_eval"] = True
    if a["load_best_model_at_end"]:
        a["metric_for_best_model"] = a["metric_for_best_model"] or "loss"
    if isinstance(metric := a["metric_for_best_model"], str) and a["greater_is_better"] is None:
        a["greater_is_better"] = not metric.endswith("loss")
    if a["eval_strategy"] == "steps":
        a["eval_steps"] = a["eval_steps"] or a["logging_steps"]
    if a["use_cpu"] is True:
        a["dataloader_pin_memory"] = False
    try:
        table.Mapped.model_validate(a)
    except ValidationError as error:
        raise RecipeError(explain(table.Mapped, error)) from None
    return a


def _recipe_values(a: Arguments) -> tuple[dict[str, Any], list[str]]:
    """A recipe's values for complete arguments, and the reason why for each argument that has none."""
    reasons = list(_unsaid(a))
    length = {"max_steps": a["max_steps"]} if a["max_steps"] > 0 else {"num_train_epochs": a["num_train_epochs"]}

    def every(what: str) -> float | str | None:
        """The recipe's word for how often a run evaluates or saves."""
        strategy = a[f"{what}_strategy"]
        return a[f"{what}_steps"] if strategy == "steps" else "epoch" if strategy == "epoch" else None

    micro = a["per_device_train_batch_size"]
    values = {
        **{name: a[name] for name in SAME},
        "lr_scheduler_kwargs": a["lr_scheduler_kwargs"] or {},
        "report_to": [] if a["report_to"] == "none" else a["report_to"],
        "micro_batch_size": micro,
        "batch_size": micro * a["gradient_accumulation_steps"],
        **length,
        "warmup_steps": a["warmup_steps"] if a["warmup_steps"] < 1 else int(a["warmup_steps"]),
        "eval_steps": every("eval"),
        "save_steps": every("save"),
        "empty_cache_steps": a["torch_empty_cache_steps"],
        "deterministic": a["full_determinism"],
        "device": "cpu" if a["use_cpu"] else "auto",
    }
    if values["eval_steps"] is not None and a["metric_for_best_model"] is not None:  # else there is nothing to compare
        metric = a["metric_for_best_model"].removeprefix("eval_")
        values["load_best_model_at_end"] = loads = a["load_best_model_at_end"]
        values["metric_for_best_model"] = None if loads and metric == "loss" else metric
        reasons += reasons_against(metric, a["greater_is_better"])
    if a["logging_strategy"] == "steps":
        values["logging_steps"] = a["logging_steps"]
    for slot in TECHNIQUES:
        try:
            values[slot] = _technique(slot, a)
        except RecipeError as error:
            reasons.append(str(error))
    return values, reasons


def _unsaid(a: Arguments) -> Iterator[str]:
    """Arguments that no recipe can express or that contradict one another, as sentences."""
    for name, (default, reason) in table.REFUSED.items():
        if a[name] != default:
            yield f"{name}: {'(hidden)' if name.endswith('_token') else repr(a[name])} {reason}"
    if a["train_sampling_strategy"] == "sequential":
        yield "train_sampling_strategy: 'sequential' keeps the data's order, and a recipe shuffles it; write 'random'"
    if a["report_to"] == ["all"]:
        yield "report_to: 'all' is what happens to be installed; name the trackers, such as tensorboard"
    if a["bf16"] and a["fp16"]:
        yield "fp16: bf16 is given too; keep one"
    for mixed in ("bf16", "fp16"):
        if a[f"{mixed}_full_eval"] and not a[mixed]:
            yield (f"{mixed}_full_eval: a recipe evaluates in the 16 bits that it trains with; write {mixed}=True too, "
                   f"or {mixed}_full_eval=False")
    checkpointing = a["gradient_checkpointing_kwargs"] or {} if a["gradient_checkpointing"] else {}
    for name, value in checkpointing.items():
        if name != "every_n_layers" and NEUTRAL.get(name) is not value:
            instead = f"write {NEUTRAL[name]}" if name in NEUTRAL else "leave it out"
            yield f"gradient_checkpointing_kwargs: {name}={value!r} is not in a recipe; {instead}"


def _technique(slot: str, a: Arguments) -> dict[str, Any]:
    """The variant of a slot that complete arguments mean, with its knobs."""
    for variant in SLOTS[slot]:
        knobs = variant.from_hf_arguments(a)
        if knobs is not None:
            return {"name": variant.name, **knobs}
    known = [name for variant in SLOTS[slot] for name in getattr(variant, "hf_names", ())]
    raise RecipeError(f"optim: {a['optim']!r} has no counterpart in a recipe; {nearest(a['optim'], known)}")

"""From a recipe's fields to TrainingArguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tightfit.errors import RecipeError
from tightfit.techniques.checkpointing import EveryBlock, EveryNth, NoCheckpointing
from tightfit.techniques.compile import NoCompile, PerBlock, WholeModel
from tightfit.techniques.loading import Loading
from tightfit.techniques.optimizer import (
    Adafactor,
    AdamW,
    AdamW4bit,
    AdamW8bit,
    AdamWAnyPrecision,
    Lion,
    Optimizer,
    Sgd,
)
from tightfit.techniques.precision import Bf16, Bf16Pure, Fp16

if TYPE_CHECKING:
    from tightfit.recipe import Recipe

Arguments = dict[str, Any]

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def require_settled(recipe: Recipe) -> None:
    open_fields = [field for field in recipe.open_choices() if field != "loss"]  # the Trainer has its own
    open_fields += ["loading.workers"] if recipe.loading.workers == "auto" else []
    if open_fields:
        raise RecipeError(
            f"{', '.join(open_fields)}: still auto, which TrainingArguments cannot say; plan the recipe first, or "
            "write a value for each"
        )


def applied_slots(recipe: Recipe) -> tuple[str, ...]:
    """The slots that `tightfit.apply` has to make on the model, because one of them is no argument; empty if all are.

    It makes all of a recipe's slots at once, so that the others must not be made by arguments again.
    """
    assert recipe.optimizer != "auto"
    pure = isinstance(recipe.precision, Bf16Pure)
    by_argument = (
        not pure
        and _optimizer_arguments(recipe.optimizer, recipe.device == "cpu") is not None
        and isinstance(recipe.checkpointing, NoCheckpointing | EveryBlock | EveryNth)
    )
    if by_argument:
        return ()
    asked = {
        "attention": True,
        "precision": pure,
        "checkpointing": not isinstance(recipe.checkpointing, NoCheckpointing),
        "compile": not isinstance(recipe.compile, NoCompile),
        "optimizer": True,
    }
    return tuple(slot for slot, made in asked.items() if made)


def plain_arguments(recipe: Recipe, applied: Sequence[str] = ()) -> Arguments:
    """The arguments that the recipe's fields say; none for a field that is still `auto`, or in `applied`."""
    arguments: Arguments = {
        "max_steps": recipe.max_steps,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": recipe.lr_scheduler_type,
        "warmup_steps": recipe.warmup_steps,
        "max_grad_norm": recipe.max_grad_norm,
        "logging_steps": recipe.logging_steps,
        "eval_strategy": "steps" if recipe.eval_steps else "no",
        "save_strategy": "steps" if recipe.save_steps else "no",
        "save_total_limit": recipe.save_total_limit,
        "seed": recipe.seed,
        "report_to": list(recipe.report_to) or "none",
        "use_cpu": recipe.device == "cpu",
    }
    optional = {
        "output_dir": recipe.output_dir,
        "eval_steps": recipe.eval_steps,
        "save_steps": recipe.save_steps,
        "torch_empty_cache_steps": recipe.empty_cache_steps,
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    micro = recipe.micro_batch_size
    if micro != "auto":
        arguments["per_device_train_batch_size"] = arguments["per_device_eval_batch_size"] = micro
        arguments["gradient_accumulation_steps"] = recipe.batch_size // micro
    arguments |= _precision_arguments(recipe, compiled_here="compile" not in applied)
    if "checkpointing" not in applied and recipe.checkpointing != "auto":
        arguments["gradient_checkpointing"] = not isinstance(recipe.checkpointing, NoCheckpointing)
        if isinstance(recipe.checkpointing, EveryNth):
            arguments["gradient_checkpointing_kwargs"] = {"every_n_layers": recipe.checkpointing.n}
    if "compile" not in applied and isinstance(recipe.compile, PerBlock | WholeModel):
        arguments |= {"torch_compile": True, "torch_compile_backend": recipe.compile.backend}
        if recipe.compile.mode != "default":
            arguments["torch_compile_mode"] = recipe.compile.mode
    if "optimizer" not in applied and recipe.optimizer != "auto":
        arguments |= _optimizer_arguments(recipe.optimizer, recipe.device == "cpu") or {}
    return arguments | _loading_arguments(recipe.loading, recipe.device == "cpu")


def _precision_arguments(recipe: Recipe, *, compiled_here: bool) -> Arguments:
    arguments: Arguments = {}
    if recipe.precision == "auto":
        return arguments
    if isinstance(recipe.precision, Fp16 | Bf16):
        name = recipe.precision.name
        arguments[name] = True
        if recipe.precision.full_eval:
            arguments[f"{name}_full_eval"] = True
    compiles = compiled_here and isinstance(recipe.compile, PerBlock | WholeModel)
    if getattr(recipe.precision, "tf32", False):
        arguments["tf32"] = True
    elif compiles and not isinstance(recipe.precision, Fp16):
        arguments["tf32"] = False  # which the Trainer otherwise turns on by itself
    return arguments


def _optimizer_arguments(optimizer: Optimizer, on_cpu: bool) -> Arguments | None:
    """The arguments of an optimizer; None where the Trainer has none for it."""
    match optimizer:
        case AdamW(implementation="auto" | "fused"):
            arguments = {"optim": "adamw_torch_fused"}
        case AdamW(implementation=written) if written == ("loop" if on_cpu else "foreach"):
            arguments = {"optim": "adamw_torch"}
        case AdamW8bit(block_size=256):
            arguments = {"optim": "adamw_torch_8bit"}
        case AdamW4bit(block_size=256):
            arguments = {"optim": "adamw_torch_4bit"}
        case AdamWAnyPrecision(momentum=momentum, variance=variance):
            formats = f"momentum_dtype={DTYPES[momentum]},variance_dtype={DTYPES[variance]}"
            arguments = {"optim": "adamw_anyprecision", "optim_args": formats}
        case Sgd(momentum=momentum):
            arguments = {"optim": "sgd", **({"optim_args": f"momentum={momentum}"} if momentum else {})}
        case Lion():
            arguments = {"optim": "lion_32bit"}
        case Adafactor():
            arguments = {"optim": "adafactor"}
        case _:
            return None
    knobs = {"weight_decay": ("weight_decay",), "betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",)}
    for knob, names in knobs.items():
        value = getattr(optimizer, knob, None)
        if value is not None:
            arguments |= zip(names, value if knob == "betas" else (value,), strict=True)
    return arguments


def _loading_arguments(loading: Loading, on_cpu: bool) -> Arguments:
    arguments: Arguments = {} if on_cpu else {"dataloader_pin_memory": loading.pin_memory}
    if loading.workers != "auto":
        arguments["dataloader_num_workers"] = loading.workers
        if loading.workers and loading.prefetch != Loading().prefetch:
            arguments["dataloader_prefetch_factor"] = loading.prefetch
    return arguments

"""From complete TrainingArguments to a recipe's values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from tightfit.errors import RecipeError, nearest
from tightfit.techniques.compile import BACKENDS, CompileMode
from tightfit.training_arguments.table import DEFAULTS, MAPPED

Arguments = Mapping[str, Any]
Values = dict[str, Any]

OPTIMIZERS: Mapping[str, Values] = {
    "adamw_torch_fused": {"name": "adamw"},
    "adamw_torch": {"name": "adamw"},
    "adafactor": {"name": "adafactor"},
    "sgd": {"name": "sgd"},
    "lion_32bit": {"name": "lion"},
    "adamw_bnb_8bit": {"name": "adamw-8bit", "block_size": 256},
    "adamw_8bit": {"name": "adamw-8bit", "block_size": 256},
    "adamw_torch_8bit": {"name": "adamw-8bit", "block_size": 256},
    "adamw_torch_4bit": {"name": "adamw-4bit", "block_size": 256},
    "adamw_anyprecision": {"name": "adamw-anyprecision"},
}
"""`optim` names and the optimizers they stand for. The Trainer gives torchao's 256 values a scale, always."""

WITH_BETAS = ("adamw", "adamw-8bit", "adamw-4bit", "lion")
ADAM_DEFAULTS = ("adamw-8bit", "adamw-4bit", "adamw-anyprecision")
"""Optimizers that the Trainer gives adam_epsilon to, and that have no knob for it here."""

WITHOUT_EFFECT = {
    "dampening": ("0", "0.0"),
    "nesterov": ("false", "0", "no"),
    "use_kahan_summation": ("n", "no", "f", "false", "off", "0"),
    "bf16_stochastic_round": ("n", "no", "f", "false", "off", "0"),
}
"""optim_args that say what is so without them."""

STRATEGIES = {"eval_strategy": ("no", "steps", "epoch"), "save_strategy": ("no", "steps", "epoch", "best")}

FORMATS = {"float32": "fp32", "bfloat16": "bf16"}

TYPES: Mapping[str, tuple[type, ...]] = {
    "optim_args": (str,),
    "tf32": (bool,),
    "gradient_checkpointing_kwargs": (dict,),
    "torch_compile_backend": (str,),
    "torch_compile_mode": (str,),
    "torch_empty_cache_steps": (int,),
    "eval_steps": (int, float),
    "save_total_limit": (int,),
    "dataloader_prefetch_factor": (int,),
    "output_dir": (str,),
    "report_to": (str, list),
    "max_grad_norm": (int, float),
    **dict.fromkeys(("warmup_steps", "logging_steps", "save_steps"), (int, float)),
}
"""Types of the mapped arguments whose default does not tell."""

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping",
         list: "a list"}  # fmt: skip


def recipe_values(a: Arguments, defaults: Arguments) -> tuple[Values, list[str]]:
    """A recipe's values for complete arguments, and reasons, each naming its argument, why some have none.

    defaults: the recipe's own, for max_steps, save_total_limit and logging_steps where the arguments have no number.
    """
    if reasons := _wrong_types(a):
        return {}, reasons
    values: Values = {}
    for part in PARTS:
        try:
            values |= part(a, defaults)
        except RecipeError as error:
            reasons.append(str(error))
    return values, reasons


def _plain_fields(a: Arguments, defaults: Arguments) -> Values:
    if a["report_to"] == ["all"]:
        raise RecipeError("report_to: 'all' is what happens to be installed; name the trackers, such as tensorboard")
    return {
        "output_dir": a["output_dir"],
        "learning_rate": a["learning_rate"],
        "lr_scheduler_type": a["lr_scheduler_type"],
        "max_grad_norm": a["max_grad_norm"],
        "seed": a["seed"],
        "empty_cache_steps": a["torch_empty_cache_steps"],
        "report_to": [] if a["report_to"] == "none" else a["report_to"],
        "device": "cpu" if a["use_cpu"] else "auto",
        "save_total_limit": defaults["save_total_limit"] if a["save_total_limit"] is None else a["save_total_limit"],
    }


def _batch(a: Arguments, defaults: Arguments) -> Values:
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if a[name] < 1:
            raise RecipeError(f"{name}: {a[name]!r} should be at least 1")
    micro = a["per_device_train_batch_size"]
    return {"micro_batch_size": micro, "batch_size": micro * a["gradient_accumulation_steps"]}


def _steps(a: Arguments, defaults: Arguments) -> Values:
    total = a["max_steps"] if a["max_steps"] > 0 else defaults["max_steps"]

    def steps(name: str) -> int:
        """A number of steps, written as one or as a share of all."""
        value = a[name]
        if value <= 0:
            raise RecipeError(f"{name}: {value!r} should be more than 0")
        if value > 1 and value != int(value):
            raise RecipeError(f"{name}: {value!r} should be a whole number, or a share of all steps below 1")
        return int(value) if value >= 1 else math.ceil(total * value)

    for name, known in STRATEGIES.items():
        if a[name] not in known:
            raise RecipeError(f"{name}: {a[name]!r} is not known; {nearest(a[name], known)}")
    if a["warmup_steps"] < 0:
        raise RecipeError(f"warmup_steps: {a['warmup_steps']!r} should be 0 or more")
    logs = a["logging_strategy"] == "steps"
    return {
        "max_steps": total,
        "warmup_steps": int(a["warmup_steps"]) if a["warmup_steps"] >= 1 else math.ceil(total * a["warmup_steps"]),
        "logging_steps": steps("logging_steps") if logs else defaults["logging_steps"],
        "eval_steps": steps("eval_steps") if a["eval_strategy"] == "steps" else None,
        "save_steps": steps("save_steps") if a["save_strategy"] == "steps" else None,
    }


def _precision(a: Arguments, defaults: Arguments) -> Values:
    if a["bf16"] and a["fp16"]:
        raise RecipeError("fp16: bf16 is given too; keep one")
    name = "bf16" if a["bf16"] else "fp16" if a["fp16"] else "fp32"
    for mixed in ("bf16", "fp16"):
        if a[f"{mixed}_full_eval"] and name != mixed:
            raise RecipeError(f"{mixed}_full_eval: a recipe evaluates in the 16 bits that it trains with; write "
                              f"{mixed}=True too, or {mixed}_full_eval=False")
    full = {"full_eval": a[f"{name}_full_eval"]} if name != "fp32" else {}
    return {"precision": {"name": name, "tf32": bool(a["tf32"]), **full}}


def _checkpointing(a: Arguments, defaults: Arguments) -> Values:
    if not a["gradient_checkpointing"]:
        return {"checkpointing": "none"}
    kwargs = dict(a["gradient_checkpointing_kwargs"] or {})
    neutral = {"use_reentrant": False, "preserve_rng_state": True, "offload": False}
    every = kwargs.pop("every_n_layers", None)
    for name, value in kwargs.items():
        if neutral.get(name) is not value:
            instead = f"write {neutral[name]}" if name in neutral else "leave it out"
            raise RecipeError(f"gradient_checkpointing_kwargs: {name}={value!r} is not in a recipe; {instead}")
    return {"checkpointing": "every-block" if every is None else {"name": "every-nth", "n": every}}


def _compile(a: Arguments, defaults: Arguments) -> Values:
    if not a["torch_compile"]:
        return {"compile": "off"}
    backend, mode = a["torch_compile_backend"], a["torch_compile_mode"] or "default"
    if backend not in BACKENDS:
        raise RecipeError(f"torch_compile_backend: {backend!r} is not in a recipe; {nearest(backend, BACKENDS)}")
    if mode not in get_args(CompileMode):
        raise RecipeError(f"torch_compile_mode: {mode!r} is not known; {nearest(mode, get_args(CompileMode))}")
    return {"compile": {"name": "whole", "backend": backend, "mode": mode}}


def _optimizer(a: Arguments, defaults: Arguments) -> Values:
    if a["optim"] not in OPTIMIZERS:
        raise RecipeError(f"optim: {a['optim']!r} has no counterpart in a recipe; {nearest(a['optim'], OPTIMIZERS)}")
    values = {**OPTIMIZERS[a["optim"]], "weight_decay": a["weight_decay"]}
    name, betas, eps = values["name"], [a["adam_beta1"], a["adam_beta2"]], a["adam_epsilon"]
    extra = _optim_args(a["optim_args"])
    if name in WITH_BETAS:
        values["betas"] = betas
    if name == "adamw":
        values["eps"] = eps
    elif name in ADAM_DEFAULTS and eps != DEFAULTS["adam_epsilon"]:
        raise RecipeError(f"adam_epsilon: {eps!r} is no knob of {name}; write {DEFAULTS['adam_epsilon']}")
    if name == "adamw-anyprecision":
        for beta in ("adam_beta1", "adam_beta2"):
            if a[beta] != DEFAULTS[beta]:
                raise RecipeError(f"{beta}: {a[beta]!r} is no knob of {name}; write {DEFAULTS[beta]}")
        extra.pop("compensation_buffer_dtype", None)  # of Kahan summation, which is refused below
        for knob in ("momentum", "variance"):
            dtype = extra.pop(f"{knob}_dtype", "float32")
            if dtype not in FORMATS:
                raise RecipeError(f"optim_args: {knob}_dtype={dtype} is not in a recipe; write float32 or bfloat16")
            values[knob] = FORMATS[dtype]
    if a["optim"] == "adamw_torch":  # torch's own choice: multi-tensor on a GPU, a loop on the CPU
        values["implementation"] = "loop" if a["use_cpu"] else "foreach"
    if name == "sgd":
        values["momentum"] = _number("momentum", extra.pop("momentum", "0"))
    for key, text in extra.items():
        if text.lower() not in WITHOUT_EFFECT.get(key, ()):
            raise RecipeError(f"optim_args: {key}={text} is no knob of a recipe's {name}; leave it out")
    return {"optimizer": values}


def _loading(a: Arguments, defaults: Arguments) -> Values:
    loading: Values = {"workers": a["dataloader_num_workers"]}
    if a["dataloader_prefetch_factor"] is not None:
        if not a["dataloader_num_workers"]:
            raise RecipeError("dataloader_prefetch_factor: needs workers; write dataloader_num_workers too")
        loading["prefetch"] = a["dataloader_prefetch_factor"]
    if not a["use_cpu"]:  # where nothing is pinned, whatever is written
        loading["pin_memory"] = a["dataloader_pin_memory"]
    return {"loading": loading}


PARTS: tuple[Callable[[Arguments, Arguments], Values], ...] = (
    _plain_fields, _batch, _steps, _precision, _checkpointing, _compile, _optimizer, _loading,
)  # fmt: skip


def _optim_args(text: str | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in (text or "").replace(" ", "").split(",") if pair]
    if broken := [key for key, equals, _ in pairs if not equals]:
        raise RecipeError(f"optim_args: {broken[0]!r} has no value; write name=value, separated by commas")
    return {key: value for key, _, value in pairs}


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RecipeError(f"optim_args: {name}={text} should be a number") from None


def _wrong_types(a: Arguments) -> list[str]:
    reasons = []
    for name, default in MAPPED.items():
        value = a[name]
        kinds = TYPES.get(name) or ((int, float) if isinstance(default, float) else (type(default),))
        if value is None and default is None:
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            reasons.append(f"{name}: {value!r} should be {WORDS[kinds[-1]]}")
    return reasons

"""Hugging Face's TrainingArguments (transformers 5.17), each with its default and what a recipe makes of it.

Every argument stands in exactly one of three tables. MAPPED make fields of a recipe. CARRIED concern what surrounds a
step (logs, hub, metrics, names): `hugging_face` keeps them as they are. REFUSED change the step, its cost or the data
in a way that a recipe cannot say; each has the reason, and what to write instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tightfit.errors import RecipeError, nearest

BATCH = ("batch_size", "micro_batch_size")

MAPPED: Mapping[str, tuple[Any, tuple[str, ...], tuple[type, ...]]] = {
    "output_dir": (None, ("output_dir",), (str,)),
    "per_device_train_batch_size": (8, BATCH, (int,)),
    "gradient_accumulation_steps": (1, BATCH, (int,)),
    "max_steps": (-1, ("max_steps",), (int,)),
    "learning_rate": (5e-5, ("learning_rate",), (int, float)),
    "lr_scheduler_type": ("linear", ("lr_scheduler_type",), (str,)),
    "warmup_steps": (0, ("warmup_steps",), (int, float)),
    "optim": ("adamw_torch_fused", ("optimizer",), (str,)),
    "optim_args": (None, ("optimizer",), (str,)),
    "weight_decay": (0.0, ("optimizer",), (int, float)),
    "adam_beta1": (0.9, ("optimizer",), (int, float)),
    "adam_beta2": (0.999, ("optimizer",), (int, float)),
    "adam_epsilon": (1e-8, ("optimizer",), (int, float)),
    "max_grad_norm": (1.0, ("max_grad_norm",), (int, float)),
    "bf16": (False, ("precision",), (bool,)),
    "fp16": (False, ("precision",), (bool,)),
    "bf16_full_eval": (False, ("precision",), (bool,)),
    "fp16_full_eval": (False, ("precision",), (bool,)),
    "tf32": (None, ("precision",), (bool,)),
    "gradient_checkpointing": (False, ("checkpointing",), (bool,)),
    "gradient_checkpointing_kwargs": (None, ("checkpointing",), (dict,)),
    "torch_compile": (False, ("compile",), (bool,)),
    "torch_compile_backend": (None, ("compile",), (str,)),
    "torch_compile_mode": (None, ("compile",), (str,)),
    "torch_empty_cache_steps": (None, ("empty_cache_steps",), (int,)),
    "logging_steps": (500, ("logging_steps",), (int, float)),
    "report_to": ("none", ("report_to",), (str, list)),
    "eval_strategy": ("no", ("eval_steps",), (str,)),
    "eval_steps": (None, ("eval_steps",), (int, float)),
    "save_strategy": ("steps", ("save_steps",), (str,)),
    "save_steps": (500, ("save_steps",), (int, float)),
    "save_total_limit": (None, ("save_total_limit",), (int,)),
    "seed": (42, ("seed",), (int,)),
    "use_cpu": (False, ("device",), (bool,)),
    "dataloader_num_workers": (0, ("loading",), (int,)),
    "dataloader_pin_memory": (True, ("loading",), (bool,)),
    "dataloader_prefetch_factor": (None, ("loading",), (int,)),
}
"""Arguments by name: the default, the recipe's fields that they make, the types of their values."""

CARRIED: Mapping[str, Any] = {
    "num_train_epochs": 3.0, "logging_strategy": "steps", "include_num_input_tokens_seen": "no",
    "log_level": "passive", "log_level_replica": "warning", "project": "huggingface", "eval_delay": 0,
    "per_device_eval_batch_size": 8, "include_for_metrics": [], "hub_strategy": "every_save",
    "length_column_name": "length",
    **dict.fromkeys((
        "average_tokens_across_devices", "log_on_each_node", "logging_nan_inf_filter", "eval_do_concat_batches",
        "dataloader_in_order", "remove_unused_columns", "skip_memory_metrics",
    ), True),
    **dict.fromkeys((
        "logging_first_step", "prediction_loss_only", "eval_on_start", "eval_use_gather_object", "batch_eval_metrics",
        "save_only_model", "save_on_each_node", "enable_jit_checkpoint", "push_to_hub", "hub_always_push",
        "load_best_model_at_end", "ignore_data_skip", "restore_callback_states_from_checkpoint",
        "dataloader_drop_last", "dataloader_persistent_workers", "do_train", "do_eval", "do_predict",
    ), False),
    **dict.fromkeys((
        "disable_tqdm", "run_name", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
        "eval_accumulation_steps", "hub_private_repo", "hub_model_id", "hub_revision", "metric_for_best_model",
        "greater_is_better", "data_seed", "dataloader_multiprocessing_context", "label_names",
        "resume_from_checkpoint",
    ), None),
}  # fmt: skip
"""Defaults of the arguments that a recipe keeps in `hugging_face` and gives back unchanged."""

_PROCESSES = "is for several processes, and a recipe is for one; leave it out"
_LIGER = "puts kernels into the model that a recipe does not have; leave it out"

REFUSED: Mapping[str, tuple[Any, str]] = {
    "lr_scheduler_kwargs": (None, "has no counterpart: a recipe's schedules take no arguments; leave it out"),
    "optim_target_modules": (None, "is for GaLore and APOLLO, which a recipe does not have; leave it out"),
    "label_smoothing_factor": (0.0, "changes the loss, which a recipe cannot say; write label_smoothing_factor=0"),
    "use_liger_kernel": (False, _LIGER),
    "liger_kernel_config": (None, _LIGER),
    "use_cache": (False, "keeps keys and values that a training step does not need; write use_cache=False"),
    "neftune_noise_alpha": (None, "adds noise to the embeddings, which a recipe cannot say; leave it out"),
    "auto_find_batch_size": (
        False, "finds the batch by running out of memory; leave it out, and give micro_batch_size='auto' to plan it",
    ),
    "full_determinism": (False, "runs other kernels than those that a recipe names; leave it out, and keep seed"),
    "accelerator_config": (None, "changes how batches are split, sent or accumulated; leave it out"),
    "train_sampling_strategy": ("random", "orders the data otherwise than at random; write 'random'"),
    "ddp_timeout": (1800, _PROCESSES),
    "local_rank": (-1, _PROCESSES),
    **dict.fromkeys((
        "parallelism_config", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
        "ddp_static_graph", "ddp_backend", "fsdp", "fsdp_config",
    ), (None, _PROCESSES)),
    "deepspeed": (None, "hands the step to an engine that a recipe does not have yet; leave it out"),
    "debug": ("", "runs checks inside every step; leave it out"),
    "hub_token": (None, "would be written into the recipe's file; leave it out, and log in with: hf auth login"),
}  # fmt: skip
"""Arguments that only their default is read of: (default, why another value is refused and what to write)."""

DEFAULTS: Mapping[str, Any] = {
    **{name: row[0] for name, row in MAPPED.items()}, **CARRIED, **{name: row[0] for name, row in REFUSED.items()},
}  # fmt: skip
"""Every argument's default."""

SPELLED = frozenset({
    "max_steps", "warmup_steps", "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "tf32",
    "gradient_checkpointing_kwargs", "torch_compile_mode", "logging_steps", "eval_strategy", "eval_steps",
    "save_strategy", "save_steps", "save_total_limit", "dataloader_prefetch_factor",
})  # fmt: skip
"""Mapped arguments of which several values mean the same recipe. `hugging_face` keeps the one that was written, and it
is given back as long as the recipe's own fields still say the same."""

REPLACED_TOO = {"lr_scheduler_type": ("lr_scheduler_kwargs",), "optimizer": ("optim_target_modules",)}
"""Refused arguments that a field of a recipe takes the place of."""

RENAMED: Mapping[str, str] = {"evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu"}
"""Names of older transformers that are read as today's."""

FORMER: Mapping[str, str] = {
    "warmup_ratio": "write warmup_steps, which below 1 is a share of all steps",
    "group_by_length": "transformers 5 calls it train_sampling_strategy",
    "adafactor": "write optim='adafactor'",
    "per_gpu_train_batch_size": "write per_device_train_batch_size",
    "per_gpu_eval_batch_size": "write per_device_eval_batch_size",
}
"""Names of older transformers, and what to write."""


def arguments_of(field: str) -> tuple[str, ...]:
    """The arguments that make a field of a recipe, which a field that is given takes the place of; none for a field
    that no argument holds."""
    return (*(name for name, (_, fields, _) in MAPPED.items() if field in fields), *REPLACED_TOO.get(field, ()))


def unknown(name: str) -> str:
    """A sentence for a name that TrainingArguments does not have."""
    hint = FORMER.get(name) or nearest(name, DEFAULTS)
    if hint.startswith("choose from"):
        hint = "leave it out"
    return f"{name}: not an argument of TrainingArguments that tightfit knows; {hint}"


def check_carried(values: Any) -> Any:
    """`hugging_face` as written, or RecipeError for an argument that has no place in it."""
    if not isinstance(values, Mapping):
        raise RecipeError(f"hugging_face: {values!r} should be a mapping of TrainingArguments' names to values")
    reasons = []
    for name in values:
        if name in CARRIED or name in SPELLED:
            continue
        if name in REFUSED:
            reasons.append(f"{name}: {REFUSED[name][1]}")
        elif name in MAPPED:
            reasons.append(f"{name}: a recipe says this itself; write {MAPPED[name][1][0]}")
        else:
            reasons.append(unknown(str(name)))
    try:
        json.dumps(dict(values))
    except (TypeError, ValueError, RecursionError) as error:
        reasons.append(f"values should be plain, as JSON writes them ({error})")
    if reasons:
        raise RecipeError("; ".join(f"hugging_face: {reason}" for reason in reasons))
    return values

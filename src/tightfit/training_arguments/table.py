"""What a recipe makes of each argument of Hugging Face's TrainingArguments (transformers 5.17), with its default.

Every argument stands in exactly one of three tables. MAPPED are fields of a recipe. CARRIED concern what surrounds a
step (logs, hub, metrics, names): `hugging_face` keeps them as they are. REFUSED change the step, its cost or the data
in a way that a recipe cannot say; each has the reason, and what to write instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tightfit.errors import RecipeError, nearest

MAPPED: Mapping[str, Any] = {
    "output_dir": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": -1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "optim_args": None,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "bf16": False,
    "fp16": False,
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    "tf32": None,
    "gradient_checkpointing": False,
    "gradient_checkpointing_kwargs": None,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "torch_empty_cache_steps": None,
    "logging_steps": 500,
    "report_to": "none",
    "eval_strategy": "no",
    "eval_steps": None,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "seed": 42,
    "use_cpu": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_prefetch_factor": None,
}
"""Arguments that are fields of a recipe, or knobs of its techniques."""

CARRIED: Mapping[str, Any] = {
    "num_train_epochs": 3.0,
    "average_tokens_across_devices": True,
    "logging_strategy": "steps",
    "logging_first_step": False,
    "log_on_each_node": True,
    "logging_nan_inf_filter": True,
    "include_num_input_tokens_seen": "no",
    "log_level": "passive",
    "log_level_replica": "warning",
    "disable_tqdm": None,
    "run_name": None,
    "project": "huggingface",
    "trackio_space_id": None,
    "trackio_bucket_id": None,
    "trackio_static_space_id": None,
    "eval_delay": 0,
    "per_device_eval_batch_size": 8,
    "prediction_loss_only": False,
    "eval_on_start": False,
    "eval_do_concat_batches": True,
    "eval_use_gather_object": False,
    "eval_accumulation_steps": None,
    "include_for_metrics": [],
    "batch_eval_metrics": False,
    "save_only_model": False,
    "save_on_each_node": False,
    "enable_jit_checkpoint": False,
    "push_to_hub": False,
    "hub_private_repo": None,
    "hub_model_id": None,
    "hub_strategy": "every_save",
    "hub_always_push": False,
    "hub_revision": None,
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "ignore_data_skip": False,
    "restore_callback_states_from_checkpoint": False,
    "data_seed": None,
    "dataloader_drop_last": False,
    "dataloader_persistent_workers": False,
    "dataloader_multiprocessing_context": None,
    "dataloader_in_order": True,
    "remove_unused_columns": True,
    "label_names": None,
    "length_column_name": "length",
    "skip_memory_metrics": True,
    "do_train": False,
    "do_eval": False,
    "do_predict": False,
    "resume_from_checkpoint": None,
}
"""Arguments that a recipe keeps in `hugging_face` and gives back unchanged."""

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
    "parallelism_config": (None, _PROCESSES),
    "train_sampling_strategy": ("random", "orders the data otherwise than at random; write 'random'"),
    "ddp_find_unused_parameters": (None, _PROCESSES),
    "ddp_bucket_cap_mb": (None, _PROCESSES),
    "ddp_broadcast_buffers": (None, _PROCESSES),
    "ddp_static_graph": (None, _PROCESSES),
    "ddp_backend": (None, _PROCESSES),
    "ddp_timeout": (1800, _PROCESSES),
    "local_rank": (-1, _PROCESSES),
    "fsdp": (None, _PROCESSES),
    "fsdp_config": (None, _PROCESSES),
    "deepspeed": (None, "hands the step to an engine that a recipe does not have yet; leave it out"),
    "debug": ("", "runs checks inside every step; leave it out"),
    "hub_token": (None, "would be written into the recipe's file; leave it out, and log in with: hf auth login"),
}  # fmt: skip
"""Arguments that only their default is read of: (default, why another value is refused and what to write)."""

DEFAULTS: Mapping[str, Any] = {**MAPPED, **CARRIED, **{name: default for name, (default, _) in REFUSED.items()}}
"""Every argument's default."""

SPELLED = frozenset({
    "max_steps", "warmup_steps", "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "tf32",
    "gradient_checkpointing_kwargs", "torch_compile_mode", "logging_steps", "eval_strategy", "eval_steps",
    "save_strategy", "save_steps", "save_total_limit", "dataloader_prefetch_factor",
})  # fmt: skip
"""Mapped arguments of which several values mean the same recipe. `hugging_face` keeps the one that was written, and it
is given back as long as the recipe's own fields still say the same."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "output_dir": ("output_dir",),
    "batch_size": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "micro_batch_size": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "max_steps": ("max_steps",),
    "learning_rate": ("learning_rate",),
    "lr_scheduler_type": ("lr_scheduler_type", "lr_scheduler_kwargs"),
    "warmup_steps": ("warmup_steps",),
    "optimizer": (
        "optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_target_modules",
    ),
    "max_grad_norm": ("max_grad_norm",),
    "precision": ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32"),
    "checkpointing": ("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    "compile": ("torch_compile", "torch_compile_backend", "torch_compile_mode"),
    "empty_cache_steps": ("torch_empty_cache_steps",),
    "logging_steps": ("logging_steps",),
    "report_to": ("report_to",),
    "eval_steps": ("eval_strategy", "eval_steps"),
    "save_steps": ("save_strategy", "save_steps"),
    "save_total_limit": ("save_total_limit",),
    "seed": ("seed",),
    "device": ("use_cpu",),
    "loading": ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"),
}  # fmt: skip
"""The arguments that make each field of a recipe; a field that is given takes their place."""

BESIDE = (
    "model", "model_overrides", "pretrained", "trust_remote_code", "task", "mode", "inference", "data", "tokenizer",
    "vocab_size", "num_labels", "seq_len", "pad_vocab_to", "pad_sequence_to", "attention", "accumulation",
    "offload", "parallel", "backend", "allow_numerics", "eval_samples", "profile_step", "resume",
    "sample_prompt", "cache_dir", "hugging_face",
)  # fmt: skip
"""Fields of a recipe that no argument holds: model, data, and what tightfit alone has."""

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
            field = next(field for field, arguments in FIELDS.items() if name in arguments)
            reasons.append(f"{name}: a recipe says this itself; write {field}")
        else:
            reasons.append(unknown(str(name)))
    try:
        json.dumps(dict(values))
    except (TypeError, ValueError, RecursionError) as error:
        reasons.append(f"values should be plain, as JSON writes them ({error})")
    if reasons:
        raise RecipeError("; ".join(f"hugging_face: {reason}" for reason in reasons))
    return values

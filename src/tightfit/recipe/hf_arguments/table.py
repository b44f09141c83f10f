"""Hugging Face's TrainingArguments (transformers 5.17), each with its default and what a recipe makes of it.

Every argument stands in exactly one of three tables. `Mapped` make fields of a recipe. CARRIED concern what surrounds
a step (logs, hub, metrics, names): `hugging_face` keeps them as they are. REFUSED change the step, its cost or the data
in a way that a recipe cannot say; each has the reason, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from tightfit.errors import RecipeError, nearest
from tightfit.recipe import synonyms
from tightfit.recipe.hf_arguments import sft


class Mapped(BaseModel):
    """Arguments that make fields of a recipe, with their types and defaults."""

    model_config = ConfigDict(strict=True, extra="ignore")

    output_dir: str | None = None
    per_device_train_batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt = 1
    max_steps: int = -1
    num_train_epochs: float = 3.0
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | None = None
    warmup_steps: float = 0
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    label_smoothing_factor: float = 0.0
    bf16: bool = False
    fp16: bool = False
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False
    tf32: bool | None = None
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    torch_empty_cache_steps: int | None = None
    full_determinism: bool = False
    logging_steps: float = 500
    report_to: list[str] | Literal["none"] = "none"
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    eval_steps: float | None = None
    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    seed: int = 42
    use_cpu: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_prefetch_factor: int | None = None


MAPPED: Mapping[str, Any] = {name: field.default for name, field in Mapped.model_fields.items()}

CARRIED: Mapping[str, Any] = {
    "logging_strategy": "steps", "include_num_input_tokens_seen": "no",
    "log_level": "passive", "log_level_replica": "warning", "project": "huggingface", "eval_delay": 0,
    "per_device_eval_batch_size": 8, "include_for_metrics": [], "hub_strategy": "every_save",
    "length_column_name": "length", "train_sampling_strategy": "random", "ddp_timeout": 1800,
    **dict.fromkeys((
        "average_tokens_across_devices", "log_on_each_node", "logging_nan_inf_filter", "eval_do_concat_batches",
        "dataloader_in_order", "remove_unused_columns", "skip_memory_metrics",
    ), True),
    **dict.fromkeys((
        "logging_first_step", "prediction_loss_only", "eval_on_start", "eval_use_gather_object", "batch_eval_metrics",
        "save_only_model", "save_on_each_node", "enable_jit_checkpoint", "push_to_hub", "hub_always_push",
        "ignore_data_skip", "restore_callback_states_from_checkpoint",
        "dataloader_drop_last", "dataloader_persistent_workers", "do_train", "do_eval", "do_predict",
    ), False),
    **dict.fromkeys((
        "disable_tqdm", "run_name", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
        "eval_accumulation_steps", "hub_private_repo", "hub_model_id", "hub_revision", "data_seed",
        "dataloader_multiprocessing_context", "label_names",
        "resume_from_checkpoint", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
        "ddp_static_graph",
    ), None),
}  # fmt: skip
"""Defaults of the arguments that a recipe keeps in `hugging_face` and gives back unchanged."""

_PROCESSES = ("is for several processes, and arguments are read for one; leave it out, and write parallel=ddp or "
              "parallel=fsdp, with a batch_size of all of them")
_LIGER = "puts kernels into the model that a recipe does not have; leave it out, and write loss=liger for its loss"

REFUSED: Mapping[str, tuple[Any, str]] = {
    "optim_target_modules": (None, "is for GaLore and APOLLO, which a recipe does not have; leave it out"),
    "use_liger_kernel": (False, _LIGER),
    "liger_kernel_config": (None, _LIGER),
    "use_cache": (False, "keeps keys and values that a training step does not need; write use_cache=False"),
    "neftune_noise_alpha": (None, "adds noise to the embeddings, which a recipe cannot say; leave it out"),
    "auto_find_batch_size": (
        False, "changes the global batch where memory runs out; leave it out: recover=true halves micro-batches alone",
    ),
    "accelerator_config": (None, "changes how batches are split, sent or accumulated; leave it out"),
    "local_rank": (-1, _PROCESSES),
    **dict.fromkeys(("parallelism_config", "ddp_backend", "fsdp", "fsdp_config"), (None, _PROCESSES)),
    "deepspeed": (None, "hands the step to DeepSpeed; leave it out, and write parallel=zero with its stage"),
    "debug": ("", "runs checks inside every step; leave it out"),
    "hub_token": (None, "would be written into the recipe's file; leave it out, and log in with: hf auth login"),
}  # fmt: skip
"""Arguments that only their default is read of: (default, why another value is refused and what to write)."""

DEFAULTS: Mapping[str, Any] = {**MAPPED, **CARRIED, **{name: default for name, (default, _) in REFUSED.items()}}
"""Every argument's default."""

SPELLED = frozenset({
    "max_steps", "num_train_epochs", "warmup_steps", "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon",
    "tf32", "gradient_checkpointing_kwargs", "torch_compile_mode", "logging_steps", "eval_strategy", "eval_steps",
    "save_strategy", "save_steps", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "dataloader_prefetch_factor",
})  # fmt: skip
"""Mapped arguments of which several values mean the same recipe. `hugging_face` keeps the one that was written, and it
is given back as long as the recipe's own fields still say the same."""

_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")

FIELDS: Mapping[str, tuple[str, ...]] = {
    "batch_size": _BATCH,
    "micro_batch_size": _BATCH,
    "lr_scheduler_type": ("lr_scheduler_type", "lr_scheduler_kwargs"),
    "optimizer": ("optim", "optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2",
                  "adam_epsilon"),
    "precision": ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32"),
    "checkpointing": ("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    "compile": ("torch_compile", "torch_compile_backend", "torch_compile_mode"),
    "empty_cache_steps": ("torch_empty_cache_steps",),
    "deterministic": ("full_determinism",),
    "eval_steps": ("eval_strategy", "eval_steps"),
    "save_steps": ("save_strategy", "save_steps"),
    "metric_for_best_model": ("metric_for_best_model", "greater_is_better"),
    "device": ("use_cpu",),
    "loading": ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"),
}  # fmt: skip
"""The arguments that make a field of a recipe, where they are not one of the field's own name."""

ASIDE: Mapping[str, Any] = {
    **dict.fromkeys(("overwrite_output_dir", "use_mps_device", "jit_mode_eval", "use_ipex", "tpu_metrics_debug",
                     "include_inputs_for_metrics", "include_tokens_per_second"), False),
    **dict.fromkeys(("tpu_num_cores", "push_to_hub_model_id", "push_to_hub_organization", "xpu_backend",
                     "fsdp_transformer_layer_cls_to_wrap", "torchdynamo", "dispatch_batches", "split_batches",
                     "logging_dir", sft.UNREAD, *sft.KEPT_ARGUMENTS), None),
    "save_safetensors": True, "fp16_opt_level": "O1", "half_precision_backend": "auto", "fp16_backend": "auto",
    "past_index": -1, "fsdp_min_num_params": 0, "mp_parameters": "", "ray_scope": "last", "sharded_ddp": [],
}  # fmt: skip
"""Arguments of transformers 4 that are gone today, and of SFTConfig, that change no step here, with their defaults:
another value is kept in `hugging_face`, which a run says, and is not given back."""


def arguments_of(field: str) -> tuple[str, ...]:
    """The arguments that make a field of a recipe, which a field that is given takes the place of; none for a field
    that no argument holds."""
    return FIELDS.get(field, (field,) if field in MAPPED else ())


def without_effect(kept: Mapping[str, Any]) -> str:
    """The arguments in `hugging_face` that ask for something other than their defaults and that no field says, with
    what to write instead where there is something, as a sentence; empty where there are none."""
    named = sorted(name for name, value in kept.items() if name not in SPELLED and value != DEFAULTS.get(name))
    if kept.get(sft.UNREAD) is False:
        named[named.index(sft.UNREAD)] += " (of conversations the assistant's turns alone are learned)"
    if str(kept.get("optim")).startswith("paged_"):
        named.append("paging of the optimizer, which is bitsandbytes' own (write offload=auto)")
    return f"hugging_face: without effect here: {', '.join(named)}" if named else ""


def fields_of(name: str) -> list[str]:
    """The fields of a recipe that an argument makes which is not called as they are."""
    own = sft.SFT_ARGUMENTS[name].field if name in sft.SFT_ARGUMENTS else ""
    return [own] if own else [field for field, names in FIELDS.items() if name in names]


def in_place_of(name: str, fields: Mapping[str, Any]) -> str:
    """Advice for a name that is none of a recipe's `fields`; empty where there is none."""
    sections = [f"{section}.{name}=..." for section, field in fields.items()
                if name in getattr(field.annotation, "model_fields", ())]
    if name in synonyms.FIELDS:
        return f"write {synonyms.FIELDS[name]}"
    if meant := fields_of(name) or sections:
        return f"write {' or '.join(meant)}"
    reason, _, advice = REFUSED.get(name, ("", ""))[1].partition("; ")
    return f"it {reason}; {'leave it out' if advice.startswith('write') else advice}" if reason else ""


def misplaced(fields: Iterable[str]) -> list[str]:
    """A sentence on fields that a recipe does not have, where two or more are arguments."""
    first, *others = [name for name in fields if name in {**DEFAULTS, **sft.SFT_ARGUMENTS, **ASIDE}] or [""]
    return [f"{first}, {others[0]}{' and others' * (len(others) > 1)}: arguments of Hugging Face; tightfit plan MODEL "
            "--training-args FILE reads a file of them, and so does train"] if others else []


def unknown(name: str) -> str:
    """A sentence for a name that TrainingArguments does not have."""
    hint = nearest(name, [*DEFAULTS, *sft.SFT_ARGUMENTS])
    if name in synonyms.FIELDS:
        hint = f"leave it out, and write {synonyms.FIELDS[name]}"
    elif hint.startswith("choose from"):
        hint = "leave it out"
    return f"{name}: not an argument of TrainingArguments that tightfit knows; {hint}"


def check_carried(values: Mapping[str, Any]) -> None:
    """Raises RecipeError for arguments that have no place in `hugging_face`."""
    reasons = []
    for name in values.keys() - CARRIED.keys() - ASIDE.keys() - SPELLED:
        if name in REFUSED:
            reasons.append(f"{name}: {REFUSED[name][1]}")
        elif name in sft.SFT_ARGUMENTS:
            field = sft.SFT_ARGUMENTS[name].field
            reasons.append(f"{name}: has no effect; {f'write {field}' if field else 'leave it out'}")
        elif name in MAPPED:
            reasons.append(f"{name}: a recipe says this itself; write {' or '.join(fields_of(name) or [name])}")
        else:
            reasons.append(unknown(name))
    if reasons:
        raise RecipeError("; ".join(f"hugging_face: {reason}" for reason in sorted(reasons)))

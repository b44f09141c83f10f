"""Arguments and recipes that the tests of their conversion run over."""

from __future__ import annotations

from tightfit.techniques import SLOTS

SETTINGS = {"output_dir": "tmp", "evaluation_strategy": "steps", "num_train_epochs": 1, "log_level": "error",
            "report_to": "none"}  # fmt: skip
ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 16}
RECOMPUTED = {**ACCUMULATED, "gradient_checkpointing": True}
LOADED = {**RECOMPUTED, "bf16": True, "optim": "adamw_bnb_8bit", "dataloader_pin_memory": True,
          "dataloader_num_workers": 4}  # fmt: skip
TINY = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}

EXAMPLES = {
    "vanilla": {"per_device_train_batch_size": 4, **SETTINGS},
    "accumulation": {**TINY, **SETTINGS},
    "checkpointing": {**TINY, "gradient_checkpointing": True, **SETTINGS},
    "fp16": {"per_device_train_batch_size": 4, "fp16": True, **SETTINGS},
    "fp16 with the rest": {**TINY, "gradient_checkpointing": True, "fp16": True, **SETTINGS},
    "bf16 alone": {"bf16": True},
    "tf32 alone": {"tf32": True},
    "adafactor": {"per_device_train_batch_size": 4, "optim": "adafactor", **SETTINGS},
    "adafactor with the rest": {
        **TINY, "gradient_checkpointing": True, "fp16": True, "optim": "adafactor", **SETTINGS,
    },
    "batch of 64": ACCUMULATED,
    "recomputed": RECOMPUTED,
    "recomputed fp16": {**RECOMPUTED, "fp16": True},
    "recomputed bf16": {**RECOMPUTED, "bf16": True},
    "recomputed bf16 with tf32": {**RECOMPUTED, "bf16": True, "tf32": True},
    "8-bit": {**RECOMPUTED, "bf16": True, "optim": "adamw_bnb_8bit"},
    "loading": LOADED,
    "empty cache": {**LOADED, "torch_empty_cache_steps": 4},
    "compile": {**LOADED, "torch_empty_cache_steps": 4, "torch_compile": True, "torch_compile_backend": "inductor"},
}  # fmt: skip
"""The complete TrainingArguments of Hugging Face's guides to training on one GPU, old and new."""

OTHER = {
    "output_dir": "elsewhere",
    "max_steps": 70,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "warmup_steps": 0.1,
    "optim": "adafactor",
    "optim_args": "momentum=0.5",
    "optim_target_modules": "all-linear",
    "gradient_checkpointing_kwargs": {"every_n_layers": 3},
    "torch_compile_backend": "aot_eager",
    "torch_compile_mode": "max-autotune",
    "torch_empty_cache_steps": 5,
    "tf32": True,
    "logging_strategy": "epoch",
    "include_num_input_tokens_seen": "all",
    "log_level": "error",
    "log_level_replica": "error",
    "disable_tqdm": True,
    "report_to": ["tensorboard"],
    "run_name": "x",
    "trackio_space_id": "x",
    "trackio_bucket_id": "x",
    "trackio_static_space_id": "x",
    "eval_strategy": "epoch",
    "eval_steps": 20,
    "eval_accumulation_steps": 2,
    "include_for_metrics": ["loss"],
    "save_strategy": "epoch",
    "save_steps": 0.25,
    "save_total_limit": 3,
    "hub_token": "secret",
    "hub_private_repo": True,
    "hub_model_id": "x",
    "hub_strategy": "end",
    "hub_revision": "x",
    "metric_for_best_model": "accuracy",
    "greater_is_better": True,
    "data_seed": 3,
    "accelerator_config": {"split_batches": True},
    "parallelism_config": {"tp_size": 2},
    "dataloader_prefetch_factor": 4,
    "dataloader_multiprocessing_context": "spawn",
    "label_names": ["labels"],
    "train_sampling_strategy": "group_by_length",
    "length_column_name": "size",
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 25,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "ddp_backend": "gloo",
    "fsdp": True,
    "fsdp_config": {"version": 2},
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "debug": "underflow_overflow",
    "resume_from_checkpoint": "checkpoint-1",
    "liger_kernel_config": {"rope": True},
    "neftune_noise_alpha": 5.0,
    "project": "x",
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
}
"""Another value than the default, for arguments whose default does not suggest one."""

NEEDS = {
    "optim_args": {"optim": "sgd"},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine"},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing": True},
    "bf16_full_eval": {"bf16": True},
    "fp16_full_eval": {"fp16": True},
    "eval_steps": {"eval_strategy": "steps"},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 2},
    "dataloader_persistent_workers": {"dataloader_num_workers": 2},
    "load_best_model_at_end": {"eval_strategy": "steps", "eval_steps": 500},
    "liger_kernel_config": {"use_liger_kernel": True},
    "fsdp_config": {"fsdp": True},
}
"""What an argument has an effect, or is allowed, with."""

SPELLINGS = {
    "optim": ["adamw_torch", "adafactor", "sgd", "lion_32bit", "adamw_8bit", "adamw_torch_4bit", "adamw_torch_8bit"],
    "eval_strategy": ["steps", "epoch"], "save_strategy": ["no", "epoch", "best"], "logging_strategy": ["no", "epoch"],
    "max_steps": [-1, 0, 10, 300], "warmup_steps": [0, 5, 0.3, 1.5], "eval_steps": [None, 3, 0.2],
    "logging_steps": [1, 7, 0.5], "tf32": [True, False],
    "gradient_checkpointing_kwargs": [{}, {"use_reentrant": False}, {"every_n_layers": 1}],
    "torch_compile_mode": ["default", "max-autotune"], "torch_compile_backend": ["inductor", "eager"],
}  # fmt: skip
"""Values among which several mean the same to a recipe."""


SETTLED = {"micro_batch_size": 8, "precision": "fp32", "checkpointing": "none", "optimizer": "adamw",
           "attention": "sdpa", "compile": "off", "loading": {"workers": 2}, "eval_steps": 100,
           "save_steps": None}  # fmt: skip
"""A recipe with no field that is auto."""

VARIANTS = [
    *({slot: rung} for slot, variants in SLOTS.items() for variant in variants
      for rung in variant.representative_settings()),
    {"precision": "tf32"},
    {"precision": {"name": "fp16", "tf32": True, "full_eval": True}},
    {"precision": "bf16", "compile": {"name": "whole", "mode": "reduce-overhead"}},
    {"precision": "fp16", "compile": "whole", "checkpointing": {"name": "every-nth", "n": 1}},
    {"optimizer": {"name": "adamw", "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
    {"optimizer": {"name": "adamw", "implementation": "loop"}, "device": "cpu"},
    {"optimizer": {"name": "adamw", "implementation": "foreach"}, "device": "cpu"},
    {"optimizer": {"name": "sgd", "momentum": 0.0}},
    {"optimizer": {"name": "adamw-4bit", "block_size": 256}},
    {"optimizer": {"name": "adamw-8bit", "block_size": 512}, "checkpointing": "every-block", "compile": "per-block"},
    {"optimizer": {"name": "adamw-anyprecision", "variance": "fp32"}},
    {"device": "cpu", "precision": "bf16", "loading": {"workers": 0}},
    {"loading": {"workers": 3, "prefetch": 4, "pin_memory": False}},
    {"max_steps": 7, "warmup_steps": 3, "lr_scheduler_type": "inverse_sqrt", "max_grad_norm": 0, "seed": 3,
     "logging_steps": 5, "eval_steps": None, "save_steps": 4, "save_total_limit": 1, "report_to": ["wandb"],
     "output_dir": "x", "learning_rate": 0.1, "empty_cache_steps": 9},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 9, "decay_type": "linear"}},
    {"pad_vocab_to": 64, "pad_sequence_to": 8}, {"label_smoothing_factor": 0.1},
    {"hugging_face": {"log_level": "error", "num_train_epochs": 5}},
    {"load_best_model_at_end": True, "save_steps": 200}, {"load_best_model_at_end": True, "save_steps": None},
    {"metric_for_best_model": "accuracy"}, {"metric_for_best_model": "perplexity", "load_best_model_at_end": True},
    {"num_train_epochs": 2.5, "warmup_steps": 0.05}, {"eval_steps": "epoch", "save_steps": "epoch"},
    {"eval_steps": "epoch", "save_steps": "epoch", "load_best_model_at_end": True},
    {"eval_steps": "epoch", "load_best_model_at_end": True},
]  # fmt: skip
"""What to change in it: every rung of every technique, and other values of each field."""

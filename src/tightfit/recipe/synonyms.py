"""Words of other tools for a recipe's fields and values, for the hints of error messages."""

from __future__ import annotations

from collections.abc import Mapping

FIELDS: Mapping[str, str] = {
    "name": "output_dir=runs/...", "run_name": "output_dir=runs/...",
    "lr": "learning_rate=...", "epochs": "num_train_epochs=...", "num_epochs": "num_train_epochs=...",
    "warmup_ratio": "warmup_steps=..., which below 1 is a share of all steps",
    "dtype": "precision=...", "torch_dtype": "precision=...", "amp": "precision=...",
    "mixed_precision": "precision=...",
    "block_size": "seq_len=...", "max_length": "seq_len=...", "max_seq_length": "seq_len=...",
    "context_length": "seq_len=...", "dataset": "data=...", "dataset_name": "data=...",
    "model_name_or_path": "model=...", "train_file": "data=...",
    "attn_implementation": "attention=...", "flash_attention": "attention=flash-attn", "fsdp": "parallel=fsdp",
    "ddp": "parallel=ddp", "deepspeed": "parallel=zero", "cpu_offload": "offload=host",
    "max_memory": "--gpu-memory for a plan", "weight_decay": "optimizer=adamw optimizer.weight_decay=...",
    "remat": "checkpointing=...", "scan_layers": "backend=jax backend.layers=scanned",
    "activations": "offload.activations=...", "weights": "offload.weights=...", "gradients": "offload.gradients=...",
    "embeddings": "offload.embeddings=true", "sweep": "accumulation.sweep=...",
    "gradient_sums": "accumulation.gradient_sums=fp32",
    "lora": "trainable=lora", "qlora": "trainable=lora base=nf4", "peft": "trainable=lora", "dora": "trainable=dora",
    "use_peft": "trainable=lora", "load_in_4bit": "base=nf4", "load_in_8bit": "base=int8",
    "lora_r": "trainable.rank=...", "lora_alpha": "trainable.alpha=...", "quantization": "base=nf4",
    "lora_dropout": "trainable.dropout=...", "lora_target_modules": "trainable.targets=[...]",
    "use_rslora": "trainable.rslora=true", "use_dora": "trainable=dora",
    "freeze": "trainable={name: layers, names: [...]}",
    "validation_file": "data.eval_source=...", "eval_dataset": "data.eval_source=...",
    "validation_split": "data.eval_split=...", "chat_template": "data.chat_template=...",
    "early_stopping": "early_stopping_patience=...", "patience": "early_stopping_patience=...",
    "eval_strategy": "eval_steps=epoch, or a number of steps",
    "save_strategy": "save_steps=epoch, or a number of steps",
    "evaluation_strategy": "eval_steps=epoch, or a number of steps",
    "save_best": "load_best_model_at_end=true",
    "grad_clip": "max_grad_norm=...", "gradient_clipping": "max_grad_norm=...", "scheduler": "lr_scheduler_type=...",
}  # fmt: skip
"""Fields to write in place of those that a recipe does not have."""

VALUES: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bfloat16", "torch.bfloat16"), "fp16": ("float16", "half", "torch.float16"),
    "fp32": ("float32", "float", "full", "torch.float32"), "fp8": ("float8",),
    "sequence-classification": ("text-classification", "sentiment-analysis", "sequence_classification"),
    "causal-lm": ("text-generation", "language-modeling", "clm"), "masked-lm": ("fill-mask", "mlm"),
    "seq2seq": ("text2text-generation", "translation", "summarization", "seq2seq-lm"),
    "cuda": ("gpu", "nvidia", "cuda:0"), "adamw": ("adam", "adamw_torch", "adamw_torch_fused"),
    "flash-attn": ("flash", "flash_attention_2", "flash2"), "fsdp": ("fsdp2",),
    "zero": ("deepspeed",), "host": ("cpu",),
    "nf4": ("4bit", "int4", "bnb-4bit", "qlora"), "int8": ("8bit", "bnb-8bit"), "all": ("full", "everything"),
    "every-block": ("full", "true", "on"), "none": ("false", "off", "no"),
}  # fmt: skip
"""A recipe's values, and other tools' words for them."""

LARGEST: Mapping[str, str] = {
    "seq_len": "; the longest that fits is told by tightfit plan MODEL --longest seq_len",
    "micro_batch_size": ", or auto; the largest that fits is told by tightfit plan MODEL --largest micro_batch_size",
}
"""Advice in place of a word such as `max`."""

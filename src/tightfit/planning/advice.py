"""What to change in a recipe that ran out of memory."""

from __future__ import annotations

from tightfit.recipe import Recipe


def smaller(recipe: Recipe) -> list[str]:
    """Recipe changes that use less memory, the least costly first."""
    changes = []
    micro = recipe.micro_batch_size
    if micro != "auto" and micro > 1:
        changes.append(f"micro_batch_size={micro // 2} (the same global batch, more accumulation)")
    if recipe.attention != "auto" and recipe.attention.name == "eager":
        changes.append("attention=sdpa (no matrix of scores)")
    if recipe.precision != "auto" and recipe.precision.name == "fp32":
        changes.append("precision=bf16 (half the activations)")
    if recipe.checkpointing != "auto" and recipe.checkpointing.name != "every-block":
        changes.append("checkpointing=every-block (recompute activations, 20 to 30 % slower)")
    if recipe.optimizer != "auto" and recipe.optimizer.state_bytes > 2:
        changes.append("optimizer=adamw-8bit (2 bytes of states a parameter instead of 8)")
    return changes or [f"seq_len={max(recipe.seq_len // 2, 1)}, or a smaller model"]

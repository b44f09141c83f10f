"""Hugging Face's TrainingArguments to a recipe, and a recipe to TrainingArguments.

What a recipe cannot hold is kept in its field `hugging_face` or refused by name, as `table` says; nothing is dropped.
trl's SFTConfig is read too, one way (`sft`). Pairs that are close, and not the same, are listed in docs/python.md.
"""

from __future__ import annotations

from tightfit.recipe.hf_arguments.conversion import from_training_arguments, training_arguments
from tightfit.recipe.hf_arguments.table import check_carried

__all__ = ["check_carried", "from_training_arguments", "training_arguments"]

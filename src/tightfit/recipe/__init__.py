"""A recipe: what to train and how; finding it, its YAML, going on from another, Hugging Face's TrainingArguments."""

from tightfit.recipe.schema import CHOICES, CHOSEN_SLOTS, Recipe
from tightfit.recipe.sections import Data, Inference

__all__ = ["CHOICES", "CHOSEN_SLOTS", "Data", "Inference", "Recipe"]

"""A text that the trained model writes: the recipe's prompt, continued."""

from __future__ import annotations

from collections.abc import Callable

from tightfit.backends.base import Step
from tightfit.data import Prepared
from tightfit.errors import OutOfMemory
from tightfit.recipe import Recipe
from tightfit.tasks import get_task

SAMPLE_TOKENS = 160


def sample_text(recipe: Recipe, step: Step, data: Prepared, say: Callable[[str], None]) -> str | None:
    """The recipe's prompt, continued by the trained model; None where there is none to continue."""
    if recipe.sample_prompt is None or get_task(recipe.task).predicts != "next" or data.tokenizer is None:
        return None
    try:
        prompt = data.tokenizer.encode_prompt(recipe.sample_prompt)
    except (TypeError, UnicodeError):  # such as a lone surrogate
        prompt = []
    if not prompt:
        say("no sample: sample_prompt holds no token to begin with")
        return None
    try:
        tokens = step.generate(prompt, SAMPLE_TOKENS, temperature=0.7, seed=recipe.seed)
    except OutOfMemory as error:
        say(f"no sample: {error}")
        return None
    if data.tokenizer.end_id in tokens:
        tokens = tokens[: tokens.index(data.tokenizer.end_id)]
    return recipe.sample_prompt + data.tokenizer.decode(tokens)

"""A plan's recipes, estimates and figures in few words."""

from __future__ import annotations

import math

from tightfit.planning.plan import Estimate, Plan, choices_of
from tightfit.planning.search.answers import written
from tightfit.planning.wording import size
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS


def work(asked: Recipe) -> str:
    """How much a step does, or generating."""
    task = TASKS[asked.task]
    length = f", seq_len {asked.seq_len:,}" if task.reads == "tokens" else ""
    if asked.mode == "train":
        return f"global batch {asked.batch_size:,}{length}"
    if not task.generates:
        return f"inference, batch {asked.batch_size:,}{length}"
    new, beams = asked.inference.new_tokens, asked.inference.beams
    return f"inference, {asked.batch_size:,} prompts{length}, {new:,} new tokens{f', {beams} beams' * (beams > 1)}"


def as_written(recipe: Recipe) -> str:
    """The choices of a resolved recipe as a person writes them."""
    micro = [f"micro_batch_size={recipe.micro_batch_size}"] if recipe.mode == "train" else []
    return " ".join([*micro, techniques(recipe)])


def techniques(recipe: Recipe) -> str:
    """The same without the micro-batch."""
    return " ".join(written(getattr(recipe, field)) for field in choices_of(recipe) if field != "micro_batch_size")


def batches(recipe: Recipe) -> str:
    """Micro-batch x accumulation."""
    micro = recipe.micro_batch_size
    assert micro != "auto"
    return f"{micro} x {math.ceil(recipe.batch_size / micro)}"


def shown(choice: object) -> str:
    """A technique in a table's cell: its name and the knobs that are not the default."""
    if not isinstance(choice, dict):
        return str(choice)
    knobs = [f"{name}={value}" for name, value in choice.items() if name != "name"]
    return " ".join([str(choice.get("name", "")), *knobs])


def fits(estimate: Estimate) -> str:
    """Whether it fits, in a word or two."""
    if estimate.fits == "no":
        return f"{size(estimate.missing)} short"
    memory = estimate.memory
    if estimate.fits == "with-retries" or (estimate.safe and memory.peak_reserved > memory.capacity - memory.margin):
        return "with retries"
    return "yes" if estimate.safe else "barely"


def speed(estimate: Estimate) -> float:
    """Tokens a second; samples a second for images."""
    return estimate.time.tokens_per_second or estimate.time.samples_per_second


def duration(seconds: float) -> str:
    """Seconds for reading."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:,.1f} min"


def unit(plan: Plan) -> str:
    """What throughput is counted in."""
    return "tokens/s" if _reads_tokens(plan) else "samples/s"


def _reads_tokens(plan: Plan) -> bool:
    return any(candidate.estimate.time.tokens_per_second for candidate in plan.candidates)

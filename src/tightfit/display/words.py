"""A plan in words: its heading and the columns of its table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tightfit.devices import GIB
from tightfit.planning.costs import Estimate, Time
from tightfit.planning.plan import Candidate, Plan, choices_of
from tightfit.planning.timing.copies import Copies
from tightfit.recipe import Recipe
from tightfit.recipe.yaml import field_text, value_text
from tightfit.tasks import DOCUMENTS_A_ROW, TASKS
from tightfit.text import around, percent, seconds, size

LONG_ROWS = 8192
"""Tokens of a packed row from which on the lengths of its documents decide much of a step's time."""


@dataclass(frozen=True)
class Column:
    """A column: its heading, a candidate's cell, and whether it is aligned right."""

    heading: str
    text: Callable[[Candidate], str]
    right: bool = False


def work(asked: Recipe) -> str:
    """The size of a step, or of a batch that is generated."""
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
    """The choices of a resolved recipe without the micro-batch."""
    fields = [field for field in choices_of(recipe) if field != "micro_batch_size"]
    fields += ["expandable_segments"] if recipe.expandable_segments is True else []
    return " ".join(field_text(field, getattr(recipe, field)) for field in fields)


def batches(recipe: Recipe) -> str:
    """Micro-batch x accumulation."""
    micro = recipe.resolved_micro_batch
    return f"{micro} x {math.ceil(recipe.parallel.of_one_process(recipe).batch_size / micro)}"


def fits(estimate: Estimate) -> str:
    """Whether it fits, in a word or two."""
    memory = estimate.memory
    if memory.fit_rank.fits:
        return memory.verdict.replace("-", " ")
    return f"{size(memory.missing)} short" if memory.missing else f"host: {size(memory.host_missing)} short"


def throughput(time: Time) -> str:
    """Tokens or samples a second, with the error of that where it is known."""
    value = time.throughput
    return f"{value:,.0f}" if time.error is None else around(value, value * time.error)


def best_or_nearest(plan: Plan) -> Candidate | None:
    """The chosen candidate; the one that lacks least where nothing fits; None of a plan without candidates."""
    return plan.chosen or next(iter(plan.candidates), None)


def heading(plan: Plan) -> str:
    """The model, the device and the size of a step."""
    memory = size(plan.device.memory_bytes)
    device = plan.device.name if memory in plan.device.name else f"{plan.device.name} ({memory})"
    if plan.device.world > 1:
        machines = f"{plan.device.machines} machines of " if plan.device.machines > 1 else ""
        device = f"{machines}{plan.device.cards} x {device}"
    model = plan.asked.model if plan.experts is None else f"{plan.asked.model} ({plan.experts.parameters_text})"
    return f"{model} on {device}: {work(plan.asked)}"


def columns(plan: Plan) -> tuple[list[Column], list[Column], list[Column]]:
    """The columns of the choices, those of their costs, and those of host memory and copies, none where none of the
    candidates has any; without the rank."""
    inference = plan.asked.mode == "inference"
    choices = [] if inference else [Column("micro x accum.", lambda c: batches(c.recipe))]
    fields = max((choices_of(candidate.recipe) for candidate in plan.candidates), key=len, default=())
    choices += [Column(field, partial(_choice, field)) for field in fields if field != "micro_batch_size"]
    unit = next((candidate.estimate.time.unit for candidate in plan.candidates), "samples/s")
    costs = [
        Column("reserved / with\ncontext, GiB",
               lambda c: f"{c.estimate.memory.peak_reserved / GIB:.1f} / {c.estimate.memory.used / GIB:.1f}", True)
        if plan.device.kind == "cuda" else Column("allocated", lambda c: size(c.estimate.memory.peak_reserved), True),
        Column("fits", lambda c: fits(c.estimate)),
        Column(unit, lambda c: throughput(c.estimate.time), True),
    ]
    if inference and TASKS[plan.asked.task].generates:
        costs.append(Column("prefill", lambda c: seconds(c.estimate.time.prefill_seconds), True))
    elif not inference:
        costs.append(Column("MFU", lambda c: percent(c.estimate.time.mfu) if c.estimate.time.mfu else "-", True))
    costs.append(Column("batch" if inference else "step", lambda c: seconds(c.estimate.time.step_seconds), True))
    if not any(candidate.estimate.memory.host_by_category for candidate in plan.candidates):
        return choices, costs, []
    return choices, costs, [
        Column("host\nGiB", lambda c: f"{c.estimate.memory.host / GIB:.1f}", True),
        Column("to the GPU /\nback, GiB",
               partial(_of_copies, lambda found: f"{found.bytes_in / GIB:.1f} / {found.bytes_out / GIB:.1f}"), True),
        Column("copies\nadd", partial(_of_copies, lambda found: seconds(found.added)), True),
        Column("hidden", partial(_of_copies, lambda found: percent(found.hidden)), True),
    ]


def _of_copies(text: Callable[[Copies], str], candidate: Candidate) -> str:
    """A figure of a candidate's copies; `-` where it makes none."""
    found = candidate.estimate.time.copies
    return "-" if found is None else text(found)


def marks(plan: Plan) -> str:
    """The meaning of the marks in the table; empty where there are none."""
    found, candidates = [], plan.candidates
    shared = [c.recipe for c in candidates if c.recipe.mode == "train"
              and c.recipe.data.shares_rows(TASKS[c.recipe.task])]
    most = max((candidate.estimate.time.mfu for candidate in candidates), default=0.0)
    if most:
        frozen = any(candidate.recipe.trainable.freezes for candidate in candidates)
        told = ", where N is the number of active parameters" * (plan.experts is not None)
        told += ", 4 N for frozen weights" * frozen
        apart = f" of a document, {DOCUMENTS_A_ROW} a row" * bool(shared)
        skipped = ", half of which causal kernels skip" * (most > 1)
        found.append(f"MFU: 6 N FLOPs a token{told}, and attention over every pair of positions{apart}{skipped}")
    if any(recipe.seq_len >= LONG_ROWS for recipe in shared):
        found.append(f"tokens/s: of {DOCUMENTS_A_ROW} documents a row; of one, which takes longer, with "
                     "data.packing=false")
    if any(candidate.changes_numerics for candidate in candidates):
        found.append("* changes numerics")
    if any(c.recipe.mode == "inference" and getattr(c.recipe.precision, "full_eval", False) for c in candidates):
        found.append("full_eval: weights of 16 bits, as model.half() makes them")
    return "  ".join(found)


def rank(plan: Plan, candidate: Candidate) -> str:
    """A candidate's number in the plan, marked where it changes numerics."""
    return f"{plan.candidates.index(candidate) + 1}{'*' * bool(candidate.changes_numerics)}"


def _choice(field: str, candidate: Candidate) -> str:
    """A technique in a table's cell: its name and the knobs that are not the default."""
    choice = candidate.recipe.to_dict()[field]
    if not isinstance(choice, dict):
        return str(choice)
    return " ".join(value if knob == "name" else f"{knob}={value_text(value)}"
                    for knob, value in choice.items())

"""Search entry point: explores the space, picks the recipe, answers follow-up questions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from tightfit.backends.base import Backend
from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.garbage import gc_paused
from tightfit.model_facts import experts_per_token, model_facts
from tightfit.models import read_config
from tightfit.planning.estimate import Tools
from tightfit.planning.plan import Candidate, Interrupted, Plan
from tightfit.planning.search.answers import TRAINING_ALONE, all_answers, brief_answers
from tightfit.planning.search.budget import TraceBudget
from tightfit.planning.search.choose import choose
from tightfit.planning.search.evaluate import Evaluator, InProcess, Progress
from tightfit.planning.search.explain import (
    SHOWN_CANDIDATES,
    figures,
    memory_shortfall,
    ranked,
    still_known,
    too_large,
    trade_off,
)
from tightfit.planning.search.exploration import Exploration
from tightfit.planning.search.explore import explore
from tightfit.planning.search.host_memory import notes_on_host_memory
from tightfit.planning.search.pool import Pool
from tightfit.planning.search.space import Space
from tightfit.planning.search.wording import choices_text
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.targets import Target
from tightfit.planning.whole_run import steps_of
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.text import counted, size

MOST_TRACES = 72
"""Traces that a search makes at most, a compiled one counted as several."""


def search_with(
    backend: Backend, recipe: Recipe, target: Target, *, module: Any = None, catalogue: Sequence[Device] = (),
    progress: Progress | None = None, for_run: bool = False,
) -> Plan:  # fmt: skip
    """`search` by a backend's predictions, in several processes where that pays. module: the caller's own, instead
    of what `recipe.model` names; it stays in this process."""
    tools = standard_tools(backend, target.calibration, module)
    pool = Pool(tools, recipe.backend.name, target.calibration) if module is None else nullcontext(None)
    with pool as evaluator:
        plan = search(recipe, target.device, tools, catalogue=catalogue, progress=progress, for_run=for_run,
                      evaluator=evaluator)
    mixture = module is None and experts_per_token(read_config(recipe))
    return replace(plan, experts=tools.model_size(recipe)) if mixture else plan


@gc_paused()
def search(
    recipe: Recipe,
    device: Device,
    tools: Tools,
    *,
    catalogue: Sequence[Device] = (),
    progress: Progress | None = None,
    comparing: bool = False,
    for_run: bool = False,
    evaluator: Evaluator | None = None,
) -> Plan:
    """The plan of a recipe on a device.

    tools: see `standard_tools`. catalogue: GPUs among which the smallest that would do is named; none are asked about
    where it is empty. progress: called before each trace. comparing: plan for a comparison of GPUs, with no trace that
    only an answer beside the choice needs, and with no change of numerics for speed. for_run: choose for the run
    that begins, of `max_steps`. evaluator: evaluates in place of `tools`, such as a pool of processes.

    Raises Refused for pins that contradict each other, naming them, and where nothing can be built; ModelError for a
    model that cannot be traced, with what can be said all the same; Interrupted at Ctrl-C where something fits by then.
    """
    inference = recipe.mode == "inference"
    if recipe.backend.compiles_whole_steps and inference:
        raise Refused(f"backend: {recipe.backend.name} is planned for training alone; write mode=train, or "
                      "backend=pytorch")
    check_length(recipe)
    asked = recipe.model_copy(update=dict.fromkeys(TRAINING_ALONE, "auto")) if inference else recipe
    if device.kind == "cuda" and not device.host_bytes:  # where nobody says, twice its own, as machines often have
        device = device.in_machine_with(2 * device.memory_bytes)
    exploration = Exploration(
        Space(asked, device, _parameters(asked, device, tools)), evaluator or InProcess(tools),
        TraceBudget(limit=MOST_TRACES),
        margin=tools.margin, steps=steps_of(recipe, for_run), keeps_numerics=comparing,
    )  # fmt: skip
    exploration.progress = None if progress is None else partial(_tell, exploration, progress)
    try:
        explore(exploration, compares=not comparing)
    except ModelError as error:
        raise ModelError(f"{error}{still_known(recipe, device, tools)}") from error
    except KeyboardInterrupt:
        if comparing or for_run or choose(exploration) is None:
            raise
        exploration.over = False
        said = f"the search was not over; this is the best of {counted(exploration.budget.made, 'trace')}"
        raise Interrupted(_plan(exploration, recipe, (), comparing=True), said) from None
    return _plan(exploration, recipe, catalogue, comparing)


def _tell(exploration: Exploration, progress: Progress, done: int, total: int | None, text: str) -> None:
    """Report progress behind the best that was found so far."""
    if total is None and exploration.found and (best := choose(exploration)) is not None:
        estimate = exploration.found[best].estimate
        speed = f"{estimate.time.throughput:,.0f} {estimate.time.unit}"
        text = f"{speed} in {size(estimate.memory.used)} so far, {text}"
    progress(done, total, text)


def _parameters(recipe: Recipe, device: Device, tools: Tools) -> int:
    """Parameters of a model that several devices train in full; 0 where that is not asked, or not known."""
    if device.world == 1 or recipe.trainable.freezes:
        return 0
    try:
        return tools.model_size(recipe).parameters
    except ModelError:
        return 0


def check_length(recipe: Recipe) -> None:
    """Raise Refused where a sequence is longer than the model has positions, as training would."""
    if TASKS[recipe.task].reads != "tokens":
        return
    try:
        model_facts(recipe).check_length(recipe.seq_len, recipe.continued_tokens)
    except ModelError:  # a model of the caller's own, or one whose configuration says nothing: tracing tells
        return


def _plan(exploration: Exploration, recipe: Recipe, catalogue: Sequence[Device], comparing: bool) -> Plan:
    best = choose(exploration)
    large = [] if comparing and best is not None else too_large(exploration)
    shown = ranked(exploration)[:SHOWN_CANDIDATES]
    head = exploration.found[best] if best is not None else large[0]
    missed = [memory_shortfall(choices_text(found.recipe, None, exploration.decided_fields) if found is head else
                     choices_text(found.recipe, head.recipe), found.estimate.memory) for found in large]
    answers = brief_answers(exploration, recipe, head) if comparing else all_answers(
        exploration, recipe, shown, head, missed, catalogue)
    notes = [] if best is None else notes_on_host_memory(exploration, best)
    reasons = [*(trade_off(exploration, found, head) for found in shown), *missed]
    if best is not None:
        reasons[0] = figures(exploration, best)
    candidates = tuple(
        Candidate(recipe=found.recipe, estimate=found.estimate,
                  changes_numerics=exploration.space.numerics(found.recipe),
                  reasons=(reason,))
        for found, reason in zip([*shown, *large], reasons, strict=True)
    )
    if exploration.progress is not None:
        exploration.progress(exploration.budget.made, exploration.budget.made, "done")
    return Plan(
        device=exploration.device, asked=recipe, candidates=candidates,
        chosen=candidates[0] if best is not None else None, answers=answers,
        notes=(*notes, *exploration.notes,
               *(f"left out: {reason}" for reason in dict.fromkeys(exploration.refused.values()))),
        tried=len(exploration.considered) * len(exploration.sizes), predictions=exploration.budget.made,
    )  # fmt: skip

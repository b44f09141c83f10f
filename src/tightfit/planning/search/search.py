"""From a recipe to a plan: explore, choose, and answer what a person asks next."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.garbage import gc_paused
from tightfit.models import model_facts
from tightfit.planning.estimate import Margin, Tools
from tightfit.planning.plan import Answers, Plan
from tightfit.planning.search import ways_out
from tightfit.planning.search.choose import Exploration
from tightfit.planning.search.evaluate import Evaluated, Evaluator, InProcess, Progress
from tightfit.planning.search.explain import (
    SHOWN,
    SHOWN_TOO_LARGE,
    candidate,
    compared,
    misses,
    ranked,
    still_known,
    too_large,
    too_short,
    why,
)
from tightfit.planning.search.findings import Pair
from tightfit.planning.search.smallest_gpu import smallest_gpu
from tightfit.planning.search.space import Space, named, written
from tightfit.recipe import Recipe
from tightfit.system import host_memory
from tightfit.tasks import TASKS
from tightfit.techniques import Technique

TRACES, COMPILATIONS = 72, 16
"""Traces that a search makes at most, a compiled one counted as several; and the same where every prediction compiles
a whole step."""
KEPT_BACK = 8
"""Of these, how many are kept for the answers."""
TRAINING_ALONE = ("micro_batch_size", "checkpointing", "optimizer")
"""Fields that generating has no use for."""


@gc_paused()
def search(
    recipe: Recipe,
    device: Device,
    tools: Tools,
    *,
    margin: Margin | None = None,
    catalogue: Sequence[Device] = (),
    host_bytes: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
    choice_alone: bool = False,
    for_run: bool = False,
    evaluator: Evaluator | None = None,
) -> Plan:
    """The plan of a recipe on a device.

    tools: see `standard_tools`. margin: what is to stay free. catalogue: GPUs among which the smallest that would do is
    named; none are asked about where it is empty. host_bytes: of the machine around the device, for offloading; by
    default this machine's. limit: traces at most. progress: called before each trace. choice_alone: make no trace that
    only an answer beside the choice needs, and take the mildest numerics that fit. for_run: choose for a run of
    `max_steps`, compiling counted. evaluator: evaluates in place of `tools`, such as a pool of processes.

    Raises Refused for pins that contradict each other, naming them, and where nothing can be built; ModelError for a
    model that cannot be traced, with what can be said all the same.
    """
    check_length(recipe)
    compiles, inference = recipe.backend.compiles_whole_steps, recipe.mode == "inference"
    if compiles and inference:
        raise Refused(f"backend: {recipe.backend.name} is planned for training alone; write mode=train, or "
                      "backend=pytorch")
    asked = recipe.model_copy(update=dict.fromkeys(TRAINING_ALONE, "auto")) if inference else recipe
    exploration = Exploration(
        Space(asked, device), evaluator or InProcess(tools, margin), progress=progress, for_run=for_run,
        mildest=choice_alone, limit=limit or (COMPILATIONS if compiles else TRACES),
        kept_back=2 if compiles or choice_alone else min(KEPT_BACK, (limit or TRACES) // 4),
    )  # fmt: skip
    try:
        exploration.run()
    except ModelError as error:
        raise ModelError(f"{error}{still_known(recipe)}") from error
    return _plan(exploration, recipe, catalogue, margin or Margin(), host_bytes, choice_alone)


def check_length(recipe: Recipe) -> None:
    """Raise Refused where a sequence is longer than the model has positions, as training would."""
    if TASKS[recipe.task].reads != "tokens":
        return
    try:
        limit = model_facts(recipe).max_positions
    except ModelError:  # a model of the caller's own, or one whose configuration says nothing: tracing tells
        return
    if limit is not None and recipe.seq_len > limit:
        raise Refused(f"seq_len: {recipe.seq_len} exceeds the model's {limit} positions; write seq_len={limit}")


def _plan(
    exploration: Exploration, recipe: Recipe, catalogue: Sequence[Device], margin: Margin, host_bytes: int | None,
    choice_alone: bool,
) -> Plan:  # fmt: skip
    best = exploration.best()
    large = [] if choice_alone and best is not None else too_large(exploration)
    large = large[: SHOWN_TOO_LARGE if best is not None else SHOWN]
    best = exploration.best()  # what was evaluated for comparison may be the better choice
    shown = ranked(exploration)[:SHOWN]
    head = exploration.found[best] if best is not None else large[0]
    sentences = why(exploration, best) if best is not None else []
    missed = [misses(_told_apart(exploration, found, head), found.estimate.memory) for found in large]
    answers = Answers(why=" ".join(sentences)) if choice_alone else _answers(
        exploration, best, shown, missed, sentences, catalogue, margin, host_bytes)
    unread = _unread(recipe) if recipe.mode == "inference" else ()
    if best is not None:  # one object says all: the chosen candidate carries the answers too
        said = [*sentences, answers.next_best, answers.smallest_gpu_text, answers.smallest_gpu_changed_text,
                answers.open_fields, *(m.sentence for m in answers.misaligned), *unread]
    else:
        said = [missed[0], answers.smallest_change_text, answers.smallest_gpu_text, answers.smallest_gpu_changed_text,
                answers.offload, *unread]
    rows = [(found, [compared(found, head)]) for found in shown]
    rows += [(found, [sentence]) for found, sentence in zip(large, missed, strict=True)]
    candidates = tuple(
        candidate(exploration, found, [text for text in said if text] if found is head else reasons)
        for found, reasons in rows
    )
    if exploration.progress is not None:
        exploration.progress(exploration.made, exploration.made, "done")
    refused = dict.fromkeys(exploration.refused.values())
    short = too_short(exploration, best) if best is not None else ""
    return Plan(
        device=exploration.device, asked=recipe, candidates=candidates,
        chosen=candidates[0] if best is not None else None, answers=answers,
        notes=(*unread, *exploration.notes, *([short] if short else ()),
               *(f"left out: {reason}" for reason in refused)),
        tried=len(exploration.weighed) * len(exploration.sizes), predictions=exploration.made,
    )  # fmt: skip


def _answers(
    exploration: Exploration, best: Pair | None, shown: Sequence[Evaluated], missed: Sequence[str],
    sentences: Sequence[str], catalogue: Sequence[Device], margin: Margin, host_bytes: int | None,
) -> Answers:  # fmt: skip
    host = host_memory().total if host_bytes is None else host_bytes
    trains, compiles = exploration.space.recipe.mode == "train", exploration.space.recipe.backend.compiles_whole_steps
    change, change_text = (None, "")
    if best is None and not compiles:
        change, change_text = ways_out.smallest_change(exploration)
    gpu, gpu_texts = smallest_gpu(exploration, catalogue, margin)
    aligned = best is None or not trains or compiles
    return Answers(
        why=" ".join(sentences),
        next_best=compared(shown[1], shown[0]) if len(shown) > 1 else "",
        would_not_fit=tuple(missed),
        smallest_change=change,
        smallest_change_text=change_text,
        smallest_gpu=gpu,
        smallest_gpu_text="".join(gpu_texts[:1]),
        smallest_gpu_changed_text="".join(gpu_texts[1:]),
        open_fields="" if compiles else ways_out.gain_of_opening(exploration),
        offload=ways_out.offload(exploration, host) if best is None and trains and not compiles else "",
        misaligned=() if aligned or best is None else ways_out.misalignments(exploration, exploration.found[best]),
    )


def _told_apart(exploration: Exploration, found: Evaluated, head: Evaluated) -> str:
    """A combination by what tells it from the plan's first one; that one by the fields that were open."""
    if found is head:
        return named(found.recipe, None, exploration.shown)
    return named(found.recipe, head.recipe)


def _unread(recipe: Recipe) -> tuple[str, ...]:
    """Sentences on pins that only training reads."""
    pinned = [written(field, value) if isinstance(value, Technique) else f"{field}={value}" for field in TRAINING_ALONE
              if (value := getattr(recipe, field)) != "auto"]
    return (f"{', '.join(pinned)}: for training alone, and not read with mode=inference.",) if pinned else ()

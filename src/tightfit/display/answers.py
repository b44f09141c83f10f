"""A plan's answers in the order in which they are asked: what to take, what would help, and what `--verbose` adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tightfit.devices import Device
from tightfit.display.words import as_written, best_or_nearest, throughput
from tightfit.planning.costs import Memory
from tightfit.planning.plan import Candidate, Label, Plan
from tightfit.planning.search.wording import changing
from tightfit.planning.timing.copies import HIDDEN_SPEED, Copies
from tightfit.planning.whole_run import startup
from tightfit.recipe import Recipe
from tightfit.recipe.yaml import field_text
from tightfit.tasks import TASKS
from tightfit.text import counted, percent, seconds, size
from tightfit.trace import UntracedMemory

SOURCES: Mapping[str, str] = {
    "cuda": "Not calibrated: times come from the data sheet's FLOP/s and bandwidth, and from efficiencies fitted on "
            "other machines; run `tightfit doctor --calibrate` on the card.",
    "cpu": "Not calibrated: times come from a rough default by the number of cores, and from efficiencies fitted on "
           "other machines; run `tightfit doctor --calibrate --device cpu`.",
}  # fmt: skip
"""Sources of times that were not calibrated, by the kind of device."""
CALIBRATED = "Calibrated: by measurements of this machine."
PLACES: Mapping[str, str] = {"allocator": "", "context": " outside the allocator", "host": " of the host's memory"}

WITH_CHOICE = frozenset({Label.WHY, Label.SCALING})
"""Answers that stand with what a plan takes."""
WAYS_OUT = frozenset({Label.CHANGE, Label.SMALLEST_GPU, Label.OPEN_FIELDS, Label.MORE_GPUS, Label.OFFLOAD,
                      Label.ADAPTERS})  # fmt: skip
"""Answers that stand in the choice's place where nothing fits."""

Lines = list[tuple[str, str]]
"""Label and text of each answer; those of one label stand together."""


def choice(plan: Plan) -> Lines:
    """The recipe to take, its speed and memory, and its trade-offs; where nothing fits, what would make it fit."""
    chosen, lines = plan.chosen, plan.answers.lines()
    largest = "longest" if plan.largest and plan.largest.field == "seq_len" else "largest"
    asked = (largest, plan.largest.text if plan.largest else "")
    if chosen is None:
        lacks = "".join(f"; #1 lacks {nearest.estimate.memory.lacking}" for nearest in plan.candidates[:1])
        held = [note for nearest in plan.candidates[:1] for note in nearest.estimate.notes if note.startswith("base:")]
        return _said(asked, ("choice", f"Nothing fits on {plan.device.name}{lacks}."), *(("note", one) for one in held),
                     *(line for line in lines if line[0] in WAYS_OUT))
    host = chosen.estimate.memory.host_by_category
    return _said(
        asked,
        ("choice", as_written(chosen.recipe)),
        ("speed", _speed(chosen)),
        ("memory", _memory(chosen.estimate.memory, plan.device)),
        ("host memory", _host_memory(chosen.estimate.memory, plan.device) if host else ""),
        ("trade-offs", _trade_offs(chosen)),
        ("whole run", str(plan.whole_run or "")),
        *(line for line in lines if line[0] in WITH_CHOICE),
    )


def suggestions(plan: Plan) -> Lines:
    """The next best and too large candidates, and changes that would help."""
    shown = WITH_CHOICE if plan.chosen is not None else WAYS_OUT
    return [line for line in plan.answers.lines() if line[0] not in shown and line not in _more_too_large(plan)]


def details(plan: Plan) -> Lines:
    """Lines of `--verbose`: memory that is not traced, where times come from, notes, and the search's counts."""
    found = [*_more_too_large(plan), *(("numerics", text) for text in _numerics(plan.candidates))]
    if (best := best_or_nearest(plan)) is not None:
        moved = best.estimate.time.copies
        found += _said(*(("not traced", _untraced(figure)) for figure in best.estimate.untraced),
                       ("copies", copies(moved, best.recipe) if moved is not None else ""),
                       ("times", CALIBRATED if best.estimate.time.calibrated else SOURCES[plan.device.kind]))
    search = f"{counted(plan.tried, 'combination')} considered, {counted(plan.predictions, 'trace')} made."
    return [*found, *(("note", note) for note in _notes(plan)), ("search", search)]


def adds(plan: Plan) -> str:
    """A line on what `--verbose` would add."""
    notes = f"{counted(count, 'note')}, " if (count := len(_notes(plan))) else ""
    return f"--verbose adds what is not traced, where times come from, {notes}and the search's counts."


def answers(plan: Plan) -> Lines:
    return choice(plan) + suggestions(plan) + details(plan)


def _said(*lines: tuple[str, str]) -> Lines:
    return [(label, text) for label, text in lines if text]


def _more_too_large(plan: Plan) -> Lines:
    """Candidates that are too large and that `--verbose` alone shows, where nothing fits: all but the first."""
    return [] if plan.chosen is not None else [(Label.TOO_LARGE, text) for text in plan.answers.would_not_fit[1:]]


def _notes(plan: Plan) -> list[str]:
    best = best_or_nearest(plan)
    return [*(best.estimate.notes if best is not None else ()), *plan.notes]


def _speed(chosen: Candidate) -> str:
    time, inference = chosen.estimate.time, chosen.recipe.mode == "inference"
    parts = [f"{throughput(time)} {time.unit}", f"{seconds(time.step_seconds)} a {'batch' if inference else 'step'}"]
    if time.prefill_seconds and time.prefill_seconds < time.step_seconds:
        parts.append(f"{seconds(time.prefill_seconds)} until the first token")
    parts += [f"MFU {percent(time.mfu)}"] if time.mfu else []
    return ", ".join(parts) + "; not calibrated" * (time.error is None and not time.calibrated)


def _memory(memory: Memory, device: Device) -> str:
    """The peak by the three accounts of it: of tensors, of PyTorch's allocator, and of the driver."""
    there, allocated = size(device.memory_bytes), size(memory.peak_allocated)
    gives_back = memory.fit_rank.is_safe and memory.used > device.memory_bytes
    reserved = f"{size(memory.peak_reserved)} with more room" if gives_back else size(memory.peak_reserved)
    held = f"{allocated} of {there} allocated" if device.kind != "cuda" else (
        f"{there if gives_back else size(memory.used)} of {there} with CUDA context (reserved {reserved}, allocated "
        f"{allocated})")
    return f"{held}; peak in the {memory.peak_in}; safety margin {size(memory.margin)}"


def _host_memory(memory: Memory, device: Device) -> str:
    there, each = device.host_bytes, f", {size(memory.host)} for each of its GPUs" if device.cards > 1 else ""
    held = size(device.cards * memory.host)
    if not device.host_assumed:
        return f"{held} of {size(there)}{each}"
    return f"{held} of {size(there)} assumed{each}; write --host-memory SIZE for yours"


def _trade_offs(chosen: Candidate) -> str:
    """Costs of the choice beside memory and time: numerics, recomputation, compiling, copies."""
    recipe, moved = chosen.recipe, chosen.estimate.time.copies
    found = [f"{changing(chosen.changes_numerics)} numerics"] if chosen.changes_numerics else []
    if recipe.trainable.freezes:
        found.append(f"{field_text('trainable', recipe.trainable)} trains few weights beside frozen ones")
    if recipe.mode == "train":
        if recipe.checkpointing != "auto" and recipe.checkpointing.recomputes:
            found.append(f"checkpointing={recipe.checkpointing.name} computes activations again in the backward pass")
        if before := startup(recipe):
            found.append(f"compiling takes {before:.0f} s or so")
    if moved is not None:
        found.append(f"copies between host and GPU make a step {seconds(moved.added)} longer")
    return "; ".join(found) or "none"


def copies(found: Copies, recipe: Recipe) -> str:
    """Time that copies between host and device add to a step, and the global batch that hides it."""
    link = f" at {found.bytes_in / found.seconds_in / 1e9:.0f} GB/s" if found.seconds_in else ""
    said = (f"A step copies {size(found.bytes_in)} to the GPU and {size(found.bytes_out)} back, which takes "
            f"{seconds(found.seconds_in)} and {seconds(found.seconds_out)} side by side{link}, and is "
            f"{seconds(found.added)} longer for it: {percent(found.hidden)} of all copying is hidden, and its speed is "
            f"{percent(found.speed)} of that without copies.")
    if found.hidden_from is None:
        return said
    enough = counted(found.hidden_from, "image")
    if TASKS[recipe.task].reads == "tokens":
        tokens = found.hidden_from * recipe.seq_len
        enough = f"{round(tokens, 2 - len(str(tokens))):,} tokens"
    return f"{said} From about {enough} in a global batch on, that is {percent(HIDDEN_SPEED)}."


def _untraced(figure: UntracedMemory) -> str:
    """Memory that no trace shows, and where its figure comes from."""
    either_way = f" (± {size(figure.uncertainty)})" if figure.uncertainty else ""
    return f"{figure.name}, {size(figure.bytes)}{either_way}{PLACES[figure.where]}: {figure.source}"


def _numerics(candidates: Sequence[Candidate]) -> list[str]:
    """Candidates that change numerics, by what does."""
    ranks: dict[tuple[str, ...], list[str]] = {}
    for rank, candidate in enumerate(candidates, start=1):
        if candidate.changes_numerics:
            ranks.setdefault(candidate.changes_numerics, []).append(f"#{rank}")
    return [f"{changing(changes)} numerics: {', '.join(marked)}." for changes, marked in ranks.items()]

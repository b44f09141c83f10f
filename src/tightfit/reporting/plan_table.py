"""A plan on a terminal: the candidates with a memory bar each, then what a person asks next.

Plain text where there is no terminal. On 80 columns the table is told in two parts, joined by the rank.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tightfit.devices import Device
from tightfit.planning.plan import Candidate, Estimate, Plan, choices_of
from tightfit.planning.search.answers import changing
from tightfit.planning.wording import percent, size
from tightfit.reporting.memory_bar import legend, memory_bar, scale_of
from tightfit.reporting.plan_words import as_written, batches, duration, fits, shown, speed, unit, work
from tightfit.tasks import TASKS

BAR = (20, 48)
"""Cells of a memory bar, at least and at most."""

CALIBRATE = {"cuda": "run `tightfit doctor --calibrate` on the card",
             "cpu": "run `tightfit doctor --calibrate --device cpu`"}


@dataclass(frozen=True)
class Column:
    """A column: its heading, what it says of a candidate, and whether it is aligned right."""

    heading: str
    text: Callable[[Candidate], str]
    right: bool = False


def show_plan(plan: Plan, console: Console) -> None:
    """Print the plan."""
    if not console.is_terminal:
        console.file.write(plan_text(plan, console.width) + "\n")
        return
    _show(plan, console)


def plan_text(plan: Plan, width: int = 100) -> str:
    """The plan as plain text, `width` characters wide."""
    console = Console(file=io.StringIO(), width=width, no_color=True, force_terminal=False)
    _show(plan, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _show(plan: Plan, console: Console) -> None:
    for block in plan_blocks(plan, console.width):
        console.print(block, highlight=False)


def plan_blocks(plan: Plan, width: int) -> list[RenderableType]:
    """What is printed of a plan, one under the other."""
    blocks: list[RenderableType] = [Text(heading(plan), style="bold")]
    if plan.device.notes:
        blocks.append(Text(f"{plan.device.name}: {plan.device.notes}"))
    if plan.candidates:
        memories = [candidate.estimate.memory for candidate in plan.candidates]
        blocks += [block for table in _tables(plan, width) for block in (Text(), table)]
        blocks.append(legend(memories, plan.device.memory_bytes, width))
        remarks = marks(plan.candidates)
        blocks += [Text(remarks)] if remarks else []
    blocks += [Text(), answers_grid(plan)]
    return blocks


def heading(plan: Plan) -> str:
    """What was planned for what."""
    memory = size(plan.device.memory_bytes)
    device = plan.device.name if memory in plan.device.name else f"{plan.device.name} ({memory})"
    return f"{plan.asked.model} on {device}: {work(plan.asked)}"


def columns(plan: Plan) -> tuple[list[Column], list[Column]]:
    """What each candidate chooses, and what that costs; the rank is apart."""
    inference = plan.asked.mode == "inference"
    choices = [] if inference else [Column("micro x accum.", lambda c: batches(c.recipe))]
    fields = choices_of(plan.asked)
    choices += [Column(field, partial(_choice, field)) for field in fields if field != "micro_batch_size"]
    costs = [
        Column("reserved", lambda c: ("" if c.verified else "~") + size(c.estimate.memory.peak_reserved), True),
        Column("fits", lambda c: fits(c.estimate)),
        Column(unit(plan), lambda c: f"{speed(c.estimate):,.0f}", True),
    ]
    if inference and TASKS[plan.asked.task].generates:
        costs.append(Column("prefill", lambda c: duration(c.estimate.time.prefill_seconds), True))
    elif not inference:
        costs.append(Column("MFU", lambda c: percent(c.estimate.time.mfu) if c.estimate.time.mfu else "-", True))
    costs.append(Column("batch" if inference else "step", lambda c: duration(c.estimate.time.step_seconds), True))
    return choices, costs


def _tables(plan: Plan, width: int) -> list[Table]:
    """One table where the width allows, else the choices and the costs apart."""
    choices, costs = columns(plan)
    whole = _table(plan, [*choices, *costs], BAR[0])
    wanted = _width(whole)
    if wanted <= width:
        return [_table(plan, [*choices, *costs], min(BAR[0] + width - wanted, BAR[1]))]
    spare = width - _width(_table(plan, costs, BAR[0]))
    ways = (_table(plan, choices), _table(plan, [choices[0], *map(_folded, choices[1:])]))
    chosen = next((table for table in ways if _width(table) <= width), None) or _written_out(plan)
    return [chosen, _table(plan, costs, min(max(BAR[0] + spare, 8), BAR[1]))]


def _folded(column: Column) -> Column:
    """The column with a word a line."""
    return replace(column, text=lambda candidate: column.text(candidate).replace(" ", "\n"))


def _written_out(plan: Plan) -> Table:
    """The choices as a person writes them, for terminals too narrow for a column each."""
    grid = Table.grid(padding=(0, 2))
    for rank, candidate in enumerate(plan.candidates, start=1):
        style = "bold" if candidate is plan.chosen else None
        micro = f"{batches(candidate.recipe)}: " if candidate.recipe.mode == "train" else ""
        grid.add_row(_rank(rank, candidate), Text(micro + as_written(candidate.recipe)), style=style)
    return grid


def _rank(rank: int, candidate: Candidate) -> str:
    return f"{rank}{'*' if candidate.changes_numerics else ''}"


def _table(plan: Plan, chosen: Sequence[Column], bar: int | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("#", justify="right")
    for column in chosen:
        table.add_column(column.heading, justify="right" if column.right else "left")
    if bar is not None:
        table.add_column("memory at the peak", no_wrap=True)
    total = plan.device.memory_bytes
    scale = scale_of([candidate.estimate.memory for candidate in plan.candidates], total)
    for rank, candidate in enumerate(plan.candidates, start=1):
        cells: list[RenderableType] = [_rank(rank, candidate)]
        cells += [Text(column.text(candidate)) for column in chosen]
        if bar is not None:
            cells.append(memory_bar(candidate.estimate.memory, total, scale, bar))
        table.add_row(*cells, style="bold" if candidate is plan.chosen else None)
    return table


def _width(table: Table) -> int:
    console = Console(file=io.StringIO(), width=1000)
    return Measurement.get(console, console.options, table).maximum


def marks(candidates: Sequence[Candidate]) -> str:
    """What the marks in the table mean; empty where there are none."""
    found = []
    if any(candidate.changes_numerics for candidate in candidates):
        found.append("* changes numerics")
    if not all(candidate.verified for candidate in candidates):
        found.append("~ interpolated between traces")
    if any(c.recipe.mode == "inference" and getattr(c.recipe.precision, "full_eval", False) for c in candidates):
        found.append("full_eval: weights of 16 bits, as model.half() makes them")
    return "  ".join(found)


def answers_grid(plan: Plan) -> Table:
    """The answers, a label and a text each."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    last = ""
    for label, text in answers(plan):
        grid.add_row(Text("" if label == last else label, style="bold"), Text(text))
        last = label
    return grid


def answers(plan: Plan) -> list[tuple[str, str]]:
    """What a person asks of a plan, and the answer: label and text; lines of one label stand together."""
    told, chosen = plan.answers, plan.chosen
    best = chosen or next(iter(plan.candidates), None)
    lines: list[tuple[str, str]] = []

    def say(label: str, *texts: str) -> None:
        lines.extend((label, text) for text in texts if text)

    if chosen is None:
        nearest = f"; #1 misses {size(best.estimate.missing)}" if best is not None else ""
        say("choice", f"Nothing fits on {plan.device.name}{nearest}.")
    else:
        say("choice", as_written(chosen.recipe))
        say("why", told.why)
    say("next best", told.next_best)
    say("too large", *told.would_not_fit)
    say("change", told.smallest_change_text)
    say("smallest GPU", told.smallest_gpu_text)
    if told.offload is not None:
        say("offload", *told.offload.sentences)
    say("alignment", *(misaligned.sentence for misaligned in told.misaligned))
    say("numerics", *_numerics(plan.candidates))
    if best is not None:
        say("not traced", *(f"{u.name}, {size(u.bytes)}{PLACES[u.where]}: {u.source}" for u in best.estimate.unseen))
        say("times", calibration(best.estimate, plan.device))
        say("note", *(note for note in best.estimate.notes if not note.startswith(UNCALIBRATED)))
    say("note", *plan.notes)
    say("search", f"{plan.tried:,} combinations weighed, {plan.predictions:,} traces made.")
    return lines


PLACES: Mapping[str, str] = {"allocator": "", "context": " outside the allocator", "host": " of the host's memory"}

UNCALIBRATED = "not calibrated"


def calibration(estimate: Estimate, device: Device) -> str:
    """Where the times come from."""
    if estimate.time.calibrated:
        return "Calibrated: by the ceilings measured on this machine."
    reason = next((note for note in estimate.notes if note.startswith(UNCALIBRATED)), UNCALIBRATED)
    return f"{reason[0].upper()}{reason[1:]}; {CALIBRATE[device.kind]}."


def _numerics(candidates: Sequence[Candidate]) -> list[str]:
    """Which candidates change numerics, by what does."""
    ranks: dict[tuple[str, ...], list[str]] = {}
    for rank, candidate in enumerate(candidates, start=1):
        if candidate.changes_numerics:
            ranks.setdefault(candidate.changes_numerics, []).append(f"#{rank}")
    return [f"{changing(changes)} numerics: {', '.join(marked)}." for changes, marked in ranks.items()]


def _choice(field: str, candidate: Candidate) -> str:
    return shown(candidate.choices()[field])

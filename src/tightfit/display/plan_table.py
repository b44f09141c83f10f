"""A plan on a terminal and in a notebook: the choice, the candidates with a memory bar each, what would help.

Plain text where there is no terminal. On 80 columns the table stands in two parts, joined by the rank.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple, Self

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tightfit.display.answers import Lines, adds, choice, details, suggestions
from tightfit.display.memory_bar import host_memory_of_each, host_parts_of, legend, memory_bar, parts_of, scale_of
from tightfit.display.tables import natural_width, plain_table
from tightfit.display.words import Column, as_written, batches, columns, heading, marks, rank
from tightfit.planning.costs import Memory
from tightfit.planning.plan import Candidate, Plan
from tightfit.recipe.yaml_text import to_yaml
from tightfit.text import size

BAR_CELLS = (20, 48)
"""Cells of a memory bar, at least and at most."""
LABEL_WIDTH = 12
"""Characters of the longest label, such as `smallest GPU`."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ReadablePlan(Plan):
    """A plan with its text and its table."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        return cls(**vars(plan))

    def __str__(self) -> str:
        return plan_text(self)

    def text(self, *, verbose: bool = False) -> str:
        """The plan as text, as printing it shows. verbose: with what `--verbose` adds."""
        return plan_text(self, verbose=verbose)

    def __repr__(self) -> str:
        if self.chosen is None:
            return f"<Plan: {heading(self)}: nothing fits>"
        memory, time = self.chosen.estimate.memory, self.chosen.estimate.time
        return (f"<Plan: {heading(self)}: {as_written(self.chosen.recipe)}: {time.throughput:,.0f} {time.unit}, "
                f"{size(memory.used)}>")

    def _repr_html_(self) -> str:
        """The plan in colour, for a notebook, with the recipe to copy."""
        width = 140
        console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True, color_system="truecolor")
        console.print(*_blocks(self, width, verbose=True), highlight=False, sep="\n")
        shown = console.export_html(inline_styles=True, code_format='<pre style="line-height:1.2">{code}</pre>')
        if self.chosen is None:
            return shown
        recipe = escape(to_yaml(self.chosen.recipe.to_dict()))
        return f"{shown}<details><summary>The recipe</summary><pre>{recipe}</pre></details>"


def show_plan(plan: Plan, console: Console, *, verbose: bool = False) -> None:
    """Print the plan. verbose: with what is not traced, where times come from, notes, and the search's counts."""
    if console.is_terminal:
        console.print(*_blocks(plan, console.width, verbose), highlight=False, sep="\n")
    else:
        console.file.write(plan_text(plan, console.width, verbose=verbose) + "\n")


def plan_text(plan: Plan, width: int = 100, *, verbose: bool = False) -> str:
    """The plan as plain text, `width` characters wide."""
    file = io.StringIO()
    console = Console(file=file, width=width, no_color=True, force_terminal=False)
    console.print(*_blocks(plan, width, verbose), highlight=False, sep="\n")
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _blocks(plan: Plan, width: int, verbose: bool) -> list[RenderableType]:
    """The parts of the plan, one under the other."""
    blocks: list[RenderableType] = [Text(heading(plan), style="bold")]
    if plan.device.notes:
        blocks.append(Text(f"{plan.device.name}: {plan.device.notes}"))
    blocks += [Text(), _grid(choice(plan))]
    if plan.candidates:
        memories = [candidate.estimate.memory for candidate in plan.candidates]
        blocks += [block for table in _tables(plan, width) for block in (Text(), table)]
        blocks.append(legend(memories, plan.device.memory_bytes, width))
        remarks = marks(plan)
        blocks += [Text(remarks)] if remarks else []
    more = details(plan) if verbose else [("more", adds(plan))]
    return [*blocks, Text(), _grid(suggestions(plan) + more)]


def _tables(plan: Plan, width: int) -> list[Table]:
    """The candidates: one table where the width allows, else the choices and the costs apart; and one of host memory
    and copies for those that offload."""
    choices, costs, copies = columns(plan)
    bars = _Bars("memory at the peak", parts_of, plan.device.memory_bytes)
    if natural_width(_table(plan, plan.candidates, [*choices, *costs], bars, BAR_CELLS[0])) <= width:
        tables = [_fitted(plan, plan.candidates, [*choices, *costs], bars, width)]
    else:
        first = replace(choices[0], heading=choices[0].heading.replace("x ", "x\n"))
        ways = (_table(plan, plan.candidates, each) for each in (choices, [first, *map(_folded, choices[1:])]))
        chosen = next((table for table in ways if natural_width(table) <= width), None) or _written_out(plan)
        tables = [chosen, _fitted(plan, plan.candidates, costs, bars, width)]
    if copies:
        heading, limit = host_memory_of_each(plan.device)
        end = "its assumed end" if plan.device.host_assumed else "its end"
        moving = [candidate for candidate in plan.candidates if candidate.estimate.memory.host_by_category]
        host_bars = _Bars(f"{heading}\n| {size(limit)}, {end}", host_parts_of, limit)
        tables.append(_fitted(plan, moving, copies, host_bars, width))
    return tables


def _fitted(plan: Plan, shown: Sequence[Candidate], chosen: Sequence[Column], bars: _Bars, width: int) -> Table:
    """The table with bars as long as the width allows."""
    least, most = BAR_CELLS
    room = width - natural_width(_table(plan, shown, chosen, bars, least))
    return _table(plan, shown, chosen, bars, min(max(least + room, 8), most))


def _folded(column: Column) -> Column:
    """The column with a word a line."""
    return replace(column, text=lambda candidate: column.text(candidate).replace(" ", "\n"))


def _written_out(plan: Plan) -> Table:
    """The choices as a person writes them, for terminals too narrow for a column each."""
    grid = Table.grid(padding=(0, 2))
    for candidate in plan.candidates:
        style = "bold" if candidate == plan.chosen else None
        micro = f"{batches(candidate.recipe)}: " if candidate.recipe.mode == "train" else ""
        grid.add_row(rank(plan, candidate), Text(micro + as_written(candidate.recipe)), style=style)
    return grid


class _Bars(NamedTuple):
    """A column of bars: its heading, a candidate's bytes by part, and where that memory ends."""

    heading: str
    held: Callable[[Memory], Mapping[str, int]]
    limit: int


def _table(
    plan: Plan, shown: Sequence[Candidate], chosen: Sequence[Column], bars: _Bars | None = None, cells: int = 0
) -> Table:
    """Candidates in those columns and, where there are `bars`, one of so many cells for each."""
    table = plain_table()
    table.add_column("#", justify="right")
    for column in chosen:
        table.add_column(column.heading, justify="right" if column.right else "left")
    if bars is not None:
        table.add_column(bars.heading, no_wrap=True)
        held = [bars.held(candidate.estimate.memory) for candidate in shown]
        scale = scale_of([sum(each.values()) for each in held], bars.limit)
    for number, candidate in enumerate(shown):
        row: list[RenderableType] = [rank(plan, candidate), *(Text(column.text(candidate)) for column in chosen)]
        if bars is not None:
            row.append(memory_bar(held[number], bars.limit, scale, cells))
        table.add_row(*row, style="bold" if candidate == plan.chosen else None)
    return table


def _grid(lines: Lines) -> Table:
    """Answers, their labels in a column of one width."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=LABEL_WIDTH)
    grid.add_column()
    last = ""
    for label, text in lines:
        grid.add_row(Text("" if label == last else label, style="bold"), Text(text))
        last = label
    return grid

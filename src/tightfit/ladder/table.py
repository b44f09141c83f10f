"""A ladder in the terminal: measured, predicted and published figures, a row a rung."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.devices import MIB
from tightfit.display.tables import natural_width
from tightfit.ladder.results import RungResult, figures_of, heading, remarks, rung_results, times
from tightfit.ladder.rows import OURS
from tightfit.ladder.run import LadderRun
from tightfit.ladder.rungs import UNKNOWN, Figures

MEASURED_COLUMNS = 6
"""Columns up to what was measured, the rung's name included; behind them stands what was predicted and published."""
NAME_WIDTH = 20
"""Characters of a rung's name in a line, at least."""


def show(run: LadderRun, console: Console) -> None:
    """Print the ladder's table with its heading, and below it why rungs did not run."""
    results = rung_results(run)
    for sentence in heading(run):
        console.print(sentence, markup=False, highlight=False)
    heads, rows = cells(results)
    whole = table(heads, rows, results)
    if natural_width(whole) <= console.width:
        console.print(whole)
    else:
        console.print(table(heads[:MEASURED_COLUMNS], [row[:MEASURED_COLUMNS] for row in rows], results), "")
        ours = [(result, row) for result, row in zip(results, rows, strict=True) if result.runner == OURS]
        others = [[row[0], *row[MEASURED_COLUMNS:]] for _, row in ours]  # nothing is predicted of a peer's loop
        if len(heads) > MEASURED_COLUMNS:
            console.print(table([heads[0], *heads[MEASURED_COLUMNS:]], others, [result for result, _ in ours]))
    if any(result.runner != OURS for result in results):
        console.print("speed and memory: a rung's against the one that it changes, a peer's against ours of the same",
                      highlight=False)
    if any(result.is_noise for result in results):
        console.print("~: within the spread of the timed steps of both recipes, which is no difference",
                      highlight=False)
    for text in notes(results):
        console.print(f"- {text}", markup=False, highlight=False)


def notes(results: Sequence[RungResult]) -> list[str]:
    """Every remark once, behind the names of its rungs."""
    names: dict[str, dict[str, None]] = {}
    for result in results:
        for text in remarks(result):
            names.setdefault(text, {})[result.name] = None
    return [f"{'; '.join(rungs)}: {text}" for text, rungs in names.items()]


def table(heads: list[str], rows: list[list[str]], results: list[RungResult]) -> Table:
    """Columns of some results as a table of the terminal; a rung's name stays readable however narrow it is."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    made.add_column(heads[0], overflow="fold", min_width=NAME_WIDTH)
    for name in heads[1:]:
        made.add_column(name, justify="right", no_wrap=True)
    for result, row in zip(results, rows, strict=True):
        made.add_row(*map(Text, row), style=None if result.runner == OURS else "dim")
    return made


def cells(results: list[RungResult]) -> tuple[list[str], list[list[str]]]:
    """The table's headings and rows: a column stands where any result has something to say in it."""
    columns = {
        "pred.": [figures_of(result.predicted, result.ladder) for result in results],
        "full": [figures_of(result.full, result.ladder) for result in results],
        "publ.": [result.rung.published if result.runner == OURS else UNKNOWN for result in results],
    }
    columns = {name: column for name, column in columns.items() if any(map(any, column))}
    heads = ["rung", "s/step", "samples/s", "MiB", "speed", "memory",
             *(f"{name} {unit}" for name in columns for unit in ("s", "MiB"))]
    rows = []
    for at, result in enumerate(results):
        row = [result.name, *_measured(result), times(result.speed) + "~" * result.is_noise, times(result.memory)]
        for name, column in columns.items():
            row += _figures(column[at], "" if name == "publ." else "-")
        rows.append(row)
    return heads, rows


def _measured(result: RungResult) -> list[str]:
    row = result.measured
    if row is None:
        return ["-", "-", "-"]
    if row.status != "done":
        return [row.status, "", ""]
    low, high = row.quartiles
    spread = f" ±{50 * (high - low) / row.median_seconds:.0f}%" if low < high else ""
    memory = _figures(figures_of(row, result.ladder), "-")[1]
    return [f"{row.median_seconds:.4g}{spread}", f"{row.samples_per_second:.4g}", memory]


def _figures(figures: Figures, missing: str) -> list[str]:
    """Seconds and MiB."""
    return [missing if figures.seconds is None else f"{figures.seconds:.3g}",
            missing if figures.memory is None else f"{figures.memory / MIB:,.0f}"]

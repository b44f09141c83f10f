"""A ladder in the terminal: what was published, what is predicted and what was measured, a row a rung."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.devices import MIB
from tightfit.ladder.climbs import Climb
from tightfit.ladder.comparisons import memory_of, published_bytes, published_seconds, seconds_of, step_quartiles
from tightfit.ladder.lines import Line, heading, lines, times
from tightfit.ladder.rows import OURS, Measured, Predicted
from tightfit.ladder.rungs import Ladder

MEASURED = 6
"""Columns up to what was measured, the rung's name included; behind them stands what was predicted and published."""
WIDE = 10_000
"""Columns of a terminal in which any table has room."""
NAMED = 20
"""Characters of a rung's name in a line, at least."""


def show(climb: Climb, console: Console) -> None:
    """Print the ladder's table with its heading, and below it why rungs did not run."""
    shown, ladder = lines(climb), climb.asked.ladder
    for sentence in heading(climb):
        console.print(sentence, markup=False, highlight=False)
    heads, rows = cells(shown, ladder)
    peers = any(line.runner != OURS for line in shown)
    whole, wider = table(heads, rows, shown), table(*cells(shown, ladder, quartiles=True), shown)
    if _has_room(wider, console):
        console.print(wider)
    elif _has_room(whole, console):
        console.print(whole)
    else:
        console.print(table(heads[:MEASURED], [row[:MEASURED] for row in rows], shown))
        if len(heads) > MEASURED:
            console.print()
            ours = [(line, row) for line, row in zip(shown, rows, strict=True) if line.runner == OURS]
            foretold = [[row[0], *row[MEASURED:]] for _, row in ours]  # and published: of a peer's loop nothing is
            console.print(table([heads[0], *heads[MEASURED:]], foretold, [line for line, _ in ours]))
    if peers:
        console.print("speed and memory: a rung's against the one that it changes, a peer's against ours of the same"
                      + ("; in brackets the quartiles over every two of their steps" if _has_room(wider, console)
                         else ""), highlight=False)
    said = dict.fromkeys(f"{line.name}: {text}" for line in shown for text in remarks(line))
    for text in said:
        console.print(f"- {text}", markup=False, highlight=False)


def table(heads: list[str], rows: list[list[str]], shown: list[Line]) -> Table:
    """Columns of some lines as a table of the terminal; what a rung is called stays readable however narrow it is."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    made.add_column(heads[0], overflow="fold", min_width=NAMED)
    for name in heads[1:]:
        made.add_column(name, justify="right", no_wrap=True)
    for line, row in zip(shown, rows, strict=True):
        made.add_row(*map(Text, row), style=None if line.runner == OURS else "dim")
    return made


def _has_room(made: Table, console: Console) -> bool:
    return console.measure(made, options=console.options.update(max_width=WIDE)).maximum <= console.width


def cells(shown: list[Line], ladder: Ladder, *, quartiles: bool = False) -> tuple[list[str], list[list[str]]]:
    """The table's headings and rows: a column stands where any line has something to say in it.

    quartiles: whether a peer's speed has its own behind it.
    """
    foretold = any(line.predicted is not None for line in shown)
    full = any(line.full is not None for line in shown)
    published = any(line.rung.published is not None for line in shown)
    heads = ["rung", "s/step", "samples/s", "MiB", "speed", "memory"]
    heads += ["pred. s", "pred. MiB"] if foretold else []
    heads += ["full s", "full MiB"] if full else []
    heads += ["publ. s", "publ. MiB"] if published else []
    rows = []
    for line in shown:
        row = [line.name, *_measured(line.measured, ladder),
               times(line.speed) + (_quartiles(line) if quartiles else ""), times(line.memory)]
        row += [_seconds(line.predicted), _mib(line.predicted, ladder)] if foretold else []
        row += [_seconds(line.full), _mib(line.full, ladder)] if full else []
        row += _published(line, ladder) if published else []
        rows.append(row)
    return heads, rows


def remarks(line: Line) -> list[str]:
    """What is to be said of a line besides its figures."""
    ran = line.measured
    said = [line.rung.note, line.same_work]
    if line.same_as:
        said.append(f"the same recipe as {line.same_as}: the two differ by noise alone")
    if ran is not None:
        said += [f"{ran.status}: {ran.reason}" if ran.status != "done" else "", *ran.notes]
    if line.predicted is not None and not line.predicted.fits and (ran is None or ran.reason != line.predicted.reason):
        said.append(f"not predicted: {line.predicted.reason}")
    if line.full is not None and line.full.fits != "yes":
        reason = line.full.reason or {"with-retries": "fits only after cached memory is given back",
                                      "no": "does not fit"}.get(line.full.fits, "")
        said.append(f"at full size: {reason}")
    return [text for text in said if text]


def _measured(ran: Measured | None, ladder: Ladder) -> list[str]:
    if ran is None:
        return ["-", "-", "-"]
    if ran.status != "done":
        return [ran.status, "", ""]
    return [f"{ran.median_seconds:.4g}", f"{ran.samples_per_second:.4g}", _mib(ran, ladder)]


def _quartiles(line: Line) -> str:
    """Those of a peer's speed in ours, in brackets; nothing for our own."""
    found = None if line.runner == OURS else step_quartiles(line)
    return "" if found is None else f" ({found[0]:.2f} to {found[1]:.2f})"


def _mib(found: Measured | Predicted | None, ladder: Ladder) -> str:
    bytes_ = memory_of(found, ladder)
    return "-" if bytes_ is None else f"{bytes_ / MIB:,.0f}"


def _seconds(found: Predicted | None) -> str:
    seconds = seconds_of(found)
    return "-" if seconds is None else f"{seconds:.3g}"


def _published(line: Line, ladder: Ladder) -> list[str]:
    """Published seconds of a step, and MiB."""
    if line.runner != OURS:
        return ["", ""]
    seconds, bytes_ = published_seconds(line.rung, ladder), published_bytes(line.rung)
    return ["" if seconds is None else f"{seconds:.3g}", "" if bytes_ is None else f"{bytes_ / MIB:,.0f}"]

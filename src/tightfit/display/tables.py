"""Tables of a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import partial

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

plain_table = partial(Table, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
"""A table with no line but the one below its headings."""


def two_columns(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and texts, side by side."""
    grid = Table.grid(padding=(0, 2))
    for name, text in rows:
        grid.add_row(Text(name), Text(text))
    return grid


def natural_width(table: Table) -> int:
    """The columns of a terminal that show a table without a broken line."""
    console = Console(file=io.StringIO(), width=10_000)
    return Measurement.get(console, console.options, table).maximum

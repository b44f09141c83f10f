"""A recipe on every GPU of the catalogue, as a table on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.planning.plan import Candidate
from tightfit.planning.search.comparison import Compared, Comparison
from tightfit.planning.wording import size
from tightfit.reporting.plan_words import batches, fits, shown, work

USUAL = {"attention": "sdpa", "compile": "off"}
"""Choices that a summary leaves out, being nearly everyone's."""


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print one line for each GPU, the best first, and below it why the others refuse the recipe."""
    rows, asked = comparison.rows, comparison.asked
    tokens = any(row.chosen is not None and row.chosen.estimate.time.tokens_per_second for row in rows)
    priced = any(row.price is not None for row in rows)
    throughput = "tokens/s" if tokens else "samples/s"
    console.print(Text(f"{asked.model}: {work(asked)}", style="bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("GPU", no_wrap=True)
    table.add_column("memory in use", justify="right", no_wrap=True)
    table.add_column(throughput, justify="right", no_wrap=True)
    if priced:
        table.add_column("per price", justify="right", no_wrap=True)
    table.add_column("best recipe")
    for row in rows:
        if row.plan is not None:
            table.add_row(*map(Text, _cells(row, priced)))
    console.print(table)
    refused: dict[str, list[str]] = {}
    for row in rows:
        if row.refused:
            refused.setdefault(row.refused, []).append(row.device.name)
    for reason, names in refused.items():
        console.print(Text(f"refused on {', '.join(names)}: {reason}"))
    if any(row.chosen is not None and row.chosen.changes_numerics for row in rows):
        console.print(Text("* changes numerics"))
    if priced:
        console.print(Text(f"per price: {throughput} for one unit of the price"))
    if any(row.chosen is not None for row in rows):
        console.print(Text("Not calibrated: times come from the data sheets' figures."))


def _cells(row: Compared, priced: bool) -> list[str]:
    assert row.plan is not None
    best = row.chosen or next(iter(row.plan.candidates), None)
    used = "-" if best is None else size(best.estimate.memory.used)
    memory = f"{used} of {size(row.device.memory_bytes)}"
    price = [] if not priced else ["-" if row.per_price is None else f"{row.per_price:,.0f}"]
    if row.chosen is None:
        lacks = "nothing fits" + ("" if best is None else f", {size(best.estimate.missing)} short")
        return [row.device.name, memory, "-", *price, lacks]
    return [row.device.name, memory, f"{row.speed:,.0f}", *price, summary(row.chosen)]


def summary(candidate: Candidate) -> str:
    """A candidate's choices in few words."""
    choices = candidate.choices()
    words = [batches(candidate.recipe).replace(" ", "")] if candidate.recipe.mode == "train" else []
    words += [shown(value) for field, value in choices.items()
              if field != "micro_batch_size" and USUAL.get(field) != value]
    word = fits(candidate.estimate)
    star = "*" if candidate.changes_numerics else ""
    return ", ".join([*words, *([word] if word != "yes" else [])]) + star

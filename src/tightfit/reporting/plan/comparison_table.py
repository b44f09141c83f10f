"""A recipe on every GPU of the catalogue, as a table on a terminal: a line for each, which 80 columns hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_lowercase

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.devices import Device
from tightfit.planning.search.every_gpu import Compared, Comparison
from tightfit.planning.wording import size
from tightfit.reporting.plan.words import batches, fits, techniques, work


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print one line for each GPU, the best first; below the table the choices that its letters stand for, and why
    other GPUs refuse the recipe."""
    rows, asked = comparison.rows, comparison.asked
    chosen = [row for row in rows if row.chosen is not None]
    priced = any(row.price is not None for row in rows)
    throughput = next((row.chosen.estimate.time.unit for row in rows if row.chosen is not None), "samples/s")
    letters = _letters(chosen)
    console.print(Text(f"{asked.model}: {work(asked)}", style="bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("GPU", no_wrap=True)
    table.add_column("memory in use", justify="right", no_wrap=True)
    table.add_column(throughput, justify="right", no_wrap=True)
    if priced:
        table.add_column("per price", justify="right", no_wrap=True)
    changed = any(row.chosen.changes_numerics for row in chosen if row.chosen is not None)
    table.add_column("best recipe", no_wrap=changed)
    if changed:
        table.add_column("numerics")
    for row in rows:
        if row.plan is not None:
            table.add_row(*map(Text, _cells(row, priced, changed, letters)))
    console.print(table)
    legend = Table.grid(padding=(0, 2))
    for written, letter in letters.items():
        legend.add_row(Text(letter), Text(written))
    console.print(legend)
    for remark in _remarks(rows, priced, throughput):
        console.print(Text(remark))


def _letters(chosen: Sequence[Compared]) -> dict[str, str]:
    """A letter for each combination of techniques that is the best of some GPU, in the order of the rows."""
    written = dict.fromkeys(techniques(row.chosen.recipe) for row in chosen if row.chosen is not None)
    return {text: _letter(number) for number, text in enumerate(written)}


def _letter(number: int) -> str:
    """a to z, then aa to zz."""
    first, last = divmod(number, len(ascii_lowercase))
    return (ascii_lowercase[first - 1] if first else "") + ascii_lowercase[last]


def _cells(row: Compared, priced: bool, changed: bool, letters: Mapping[str, str]) -> list[str]:
    assert row.plan is not None
    best = row.chosen or next(iter(row.plan.candidates), None)
    used = "-" if best is None else size(best.estimate.memory.used)
    memory = f"{used} of {size(row.device.memory_bytes)}"
    price = [] if not priced else ["-" if row.per_price is None else f"{row.per_price:,.0f}"]
    numerics = [_numerics(row)] if changed else []
    if row.chosen is None:
        lacks = "nothing fits" if best is None else f"none: {size(best.estimate.missing)} short"
        return [row.device.name, memory, "-", *price, lacks, *numerics]
    chosen = row.chosen
    micro = [batches(chosen.recipe)] if chosen.recipe.mode == "train" else []
    word = fits(chosen.estimate)
    remark = [word] if word != "yes" else []
    words = ", ".join([" ".join([*micro, letters[techniques(chosen.recipe)]]), *remark])
    return [row.device.name, memory, f"{row.speed:,.0f}", *price,
            words + "*" * bool(chosen.changes_numerics), *numerics]


def _numerics(row: Compared) -> str:
    """What the row's choice changes in results: technique names, or that they are kept."""
    if row.chosen is None:
        return "-"
    return ", ".join(change.partition("=")[2] for change in row.chosen.changes_numerics) or "kept"


def _remarks(rows: Sequence[Compared], priced: bool, throughput: str) -> list[str]:
    """What has to be said below the table, a line each."""
    refused: dict[str, list[str]] = {}
    for row in rows:
        if row.refused:
            refused.setdefault(row.refused, []).append(row.device.name)
    remarks = [f"refused on {', '.join(names)}: {reason}" for reason, names in refused.items()]
    if any(row.chosen is not None and row.chosen.changes_numerics for row in rows):
        remarks.append("* changes numerics: where nothing milder fits")
    if priced:
        remarks.append(f"per price: {throughput} for one unit of the price")
    tied = _tied(rows)
    if tied:
        remarks.append(f"equal {throughput} of unlike GPUs ({', '.join(tied)}): they wait for the host, which issues "
                       "kernels as fast for each")
    if any(row.chosen is not None for row in rows):
        remarks.append("Not calibrated: times come from the data sheets' figures.")
    return remarks


def _tied(rows: Sequence[Compared]) -> list[str]:
    """GPUs that are predicted to be as fast as another of other figures, which the host alone can make them."""
    groups: dict[str, list[Device]] = {}
    for row in rows:
        if row.chosen is not None:
            groups.setdefault(f"{row.speed:,.0f}", []).append(row.device)
    return [device.name for group in groups.values() for device in group
            if any(other.bandwidth != device.bandwidth and _peak(other) != _peak(device) for other in group)]


def _peak(device: Device) -> float:
    return max(device.flops.values(), default=0.0)

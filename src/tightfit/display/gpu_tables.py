"""GPUs as tables on a terminal, a line each: the catalogue, and a recipe planned for several or all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product
from string import ascii_lowercase

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.devices import GIB, catalogue
from tightfit.display.tables import plain_table, two_columns
from tightfit.display.words import as_written, batches, best_or_nearest, fits, techniques, throughput, work
from tightfit.planning.search.every_gpu import Comparison, GpuRow
from tightfit.planning.search.overview import GpuEstimate, Overview
from tightfit.planning.whole_run import unit_of
from tightfit.text import counted, figure, size


def gpu_table() -> Table:
    """The names that `--gpu` takes, and the figures that plans are made with."""
    table = _table("--gpu", ["memory", "GB/s", "capability", "16-bit TFLOP/s"])
    for device in catalogue():
        major, minor = device.capability or (0, 0)
        half = max(device.flops.get("bf16", 0.0), device.flops.get("fp16", 0.0))
        table.add_row(device.name.lower().replace(" ", "-"), size(device.memory_bytes),
                      f"{device.bandwidth / 1e9:,.0f}", f"{major}.{minor}", f"{half / 1e12:,.0f}")
    return table


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print one line for each GPU, the best first; below the table the choices that its letters stand for, and why
    other GPUs refuse the recipe."""
    rows, asked = comparison.rows, comparison.asked
    planned = [row for row in rows if row.plan is not None]
    chosen = [row.chosen for row in rows if row.chosen is not None]
    unit = chosen[0].estimate.time.unit if chosen else "samples/s"
    written = dict.fromkeys(techniques(candidate.recipe) for candidate in chosen)
    names = chain(ascii_lowercase, map("".join, product(ascii_lowercase, repeat=2)))  # a to z, then aa to zz
    letters = dict(zip(written, names, strict=False))
    console.print(Text(f"{asked.model}: {work(asked)}", style="bold"))
    if answer := _best(comparison):
        console.print(Text(answer))
    runs = [row.whole_run(comparison.tokens) for row in planned]
    unit_of_runs, hours = unit_of(min((run.hours for run in runs if run), default=1.5))
    prices = ["" if row.per_price is None or any(runs) else figure(row.per_price) for row in planned]
    changed = any(candidate.changes_numerics for candidate in chosen)
    columns = {  # a cell for each GPU, empty where there is nothing to say
        "memory in use,\nGiB": [f"{_used(row)} of {row.device.memory_bytes / GIB:.1f}" for row in planned],
        "host,\nGiB": [f"{_host(row) / GIB:.0f}" if _host(row) else "" for row in planned],
        unit: [throughput(row.chosen.estimate.time) if row.chosen else "" for row in planned],
        unit_of_runs: [f"{run.hours / hours:,.1f}" if run else "" for run in runs],
        "cost": [figure(run.cost, 2) if run and run.cost is not None else "" for run in runs],
        "per price": prices,
        "best\nrecipe": [_choice(row, letters) for row in planned],
        "numerics": [_numerics(row) if changed else "" for row in planned],
    }
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    table = _table("GPU", columns, words=("best\nrecipe", "numerics"))
    for row, *cells in zip(planned, *columns.values(), strict=True):
        table.add_row(row.device.name, *(Text(cell or "-") for cell in cells))
    console.print(table)
    console.print(two_columns((letter, text) for text, letter in letters.items()))
    sheets = "Not calibrated: times come from the data sheets' figures."
    assumed = sorted({row.plan.device.host_bytes for row in planned
                      if row.plan and _host(row) and row.plan.device.host_assumed})
    sizes = " to ".join(dict.fromkeys(size(each) for each in (*assumed[:1], *assumed[-1:])))
    host_is = f"host: of the machine's memory, {sizes} of it assumed; write --host-memory SIZE for yours"
    said = ((host_is, assumed), ("cost: of the whole run, at an hour's --price", "cost" in columns),
            (f"per price: {unit} for one unit of the price", "per price" in columns), (sheets, chosen))
    unread = next((row.plan.answers.unread for row in rows if row.plan is not None), ())
    for remark in (*_refusals(rows), *(f"not read: {text}" for text in unread),
                   *(text for text, applies in said if applies)):
        console.print(Text(remark))


def _best(comparison: Comparison) -> str:
    """A line on the best GPU of several, and on those that may be as good; empty where the recipe fits one or none."""
    best, close = comparison.best, [row.device.name for row in comparison.close]
    if best is None or best.chosen is None or sum(row.chosen is not None for row in comparison.rows) < 2:
        return ""
    run = best.whole_run(comparison.tokens)
    speed = f"{throughput(best.chosen.estimate.time)} {best.chosen.estimate.time.unit}"
    if run is not None and run.cost is not None:
        low, high = (figure(run.cost * end / run.hours, 2) for end in (run.low, run.high))
        found = f"cheapest: {best.device.name}, for {figure(run.cost, 2)} ({low} to {high})"
    else:
        found = f"{'fastest' if best.price is None else 'most per price'}: {best.device.name}, {speed}"
    if host := _host(best):
        found += f", with {size(host)} of its machine's memory"
    also = f"; too close to tell by predictions: {', '.join(close)}" if close else ""
    return f"{found}{also}"


def show_overview(overview: Overview, console: Console) -> None:
    """Print one line for each GPU, the smallest first, with memory in use and speed in each way, or the memory that it
    would need; below the table what each way is."""
    asked, estimates = overview.asked, [each for card in overview.cards for each in card.ways.values()]
    names = list(overview.cards[0].ways)
    fitting = [(each, each.time) for each in estimates if isinstance(each, GpuEstimate) and each.time]
    unit = next((time.unit for _, time in fitting), "tokens/s")
    console.print(Text(f"{asked.model} on every GPU of the catalogue: {work(asked)}", style="bold"))
    smallest = [f"{name} {'none' if device is None else device.name}" for name, device in overview.smallest.items()]
    console.print(Text(f"smallest: {', '.join(smallest)}"))
    table = _table("GPU", ["GiB", *(f"{name}\nGiB {unit}" for name in names)])
    for card in overview.cards:
        cells = [_way(card.ways[name]) for name in names]
        table.add_row(card.device.name, f"{card.device.memory_bytes / GIB:.0f}", *map(Text, cells))
    console.print(table)
    legend: list[tuple[str, str]] = []
    for name in names:
        cards: dict[str, list[str]] = {}
        for card in overview.cards:
            if isinstance(each := card.ways[name], GpuEstimate) and each.time:
                cards.setdefault(as_written(each.recipe), []).append(card.device.name)
        commonest = max(cards, key=lambda recipe: len(cards[recipe]), default="")
        for recipe, on in sorted(cards.items(), key=lambda item: item[0] == commonest):
            where = f" on {', '.join(on) if recipe != commonest else 'the others'}" if len(cards) > 1 else ""
            legend.append((name, f"{recipe}{where}"))
    console.print(two_columns(legend))
    host = max((each.memory.host for each, _ in fitting if each.recipe.offloaded.uses_host), default=0)
    refused = dict.fromkeys(each for each in estimates if isinstance(each, str))
    for remark in (
        *(f"refused where there is -: {reason}" for reason in refused),
        *[f"offload=host: with up to {size(host)} of the machine's memory"] * (host > 0),
        "no: more than the card has, or less than the margin free",
        f"{counted(overview.traces, 'trace')} for all cards, of few recipes each, compiled only where nothing "
        f"else fits: tightfit plan {asked.model} --gpu NAME searches for the fastest. Not calibrated.",
    ):
        console.print(Text(remark))


def _way(estimate: GpuEstimate | str) -> str:
    if isinstance(estimate, str):
        return "-"
    used = f"{estimate.memory.used / GIB:.1f}"
    if estimate.time is None:
        return f"{used}     no"
    speed = estimate.time.throughput
    return f"{used} {f'{speed / 1000:.1f}k' if speed >= 1000 else f'{speed:.0f}':>6}"


def _table(first: str, headings: Iterable[str], words: Sequence[str] = ()) -> Table:
    """A table of a name and figures, which are aligned right. words: headings of columns that are none."""
    table = plain_table()
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", no_wrap=heading not in words)
    return table


def _host(row: GpuRow) -> int:
    """Bytes of a machine's memory that a row's plan takes for what waits there; 0 where nothing does."""
    memory = None if row.chosen is None else row.chosen.estimate.memory
    return memory.host if memory is not None and memory.host_by_category else 0


def _used(row: GpuRow) -> str:
    """GiB that a row's choice takes, or what lacks least."""
    best = None if row.plan is None else best_or_nearest(row.plan)
    return "-" if best is None else f"{best.estimate.memory.used / GIB:.1f}"


def _choice(row: GpuRow, letters: Mapping[str, str]) -> str:
    """The choice's micro-batch and the letter of its techniques; what is lacking where nothing fits."""
    if row.chosen is None:
        nearest = None if row.plan is None else best_or_nearest(row.plan)
        return "nothing fits" if nearest is None else f"none: {nearest.estimate.memory.lacking} short"
    recipe, word = row.chosen.recipe, fits(row.chosen.estimate)
    micro = f"{batches(recipe)} " if recipe.mode == "train" else ""
    return f"{micro}{letters[techniques(recipe)]}{f', {word}' if word != 'yes' else ''}"


def _numerics(row: GpuRow) -> str:
    return "" if row.chosen is None else "changed" if row.chosen.changes_numerics else "same"


def _refusals(rows: Iterable[GpuRow]) -> list[str]:
    """A line for each reason of refusing the recipe, with the GPUs that do."""
    refused = dict[str, list[str]]()
    for row in rows:
        if row.refused:
            refused.setdefault(row.refused, []).append(row.device.name)
    return [f"refused on {', '.join(names)}: {reason}" for reason, names in refused.items()]

"""The charts of a ladder's page, by plotly, each with a sentence and a table of its figures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from tightfit.devices import MIB
from tightfit.ladder.results import RungResult, figures_of, front, own, rung_results
from tightfit.ladder.rows import OURS
from tightfit.ladder.run import LadderRun
from tightfit.ladder.rungs import Ladder, card_name
from tightfit.page import label_of, styled
from tightfit.text import relative

TITLES = {"seconds": "Time of a step", "memory": "Memory", "full-seconds": "Time of a step at full size",
          "full-memory": "Memory at full size", "throughput": "Throughput against memory"}  # fmt: skip
"""The charts of a page, in its order."""
COLOURS = {"published": "#9a9a9a", "measured": "#56b4e9", "predicted": "#e8743b"}
FRONT_COLOUR = "#d55e00"
ROW_LETTERS, MOST_ROWS = 24, 3
"""Letters of a row of a rung's name next to its bars, and rows of one."""
UNITS = {"seconds": ("Seconds of a step", 1.0, ".4g"), "memory": ("Peak memory, MiB", float(MIB), ",.0f")}
"""Each figure's axis, its unit in seconds or bytes, and how a value is written."""
Series = dict[tuple[str, str], list[float | None]]
"""A figure of each rung, by its source (published, measured, predicted) and its device."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart and its table. text: a sentence on what it shows."""

    name: str
    figure: Any
    text: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def title(self) -> str:
        return TITLES[self.name]


def draw(run: LadderRun) -> list[Chart]:
    """The charts that have figures: of the scale that ran, of the full size where it is predicted, of throughput."""
    results, ladder, gpu, device = rung_results(run), run.ladder, run.gpu, run.machine.device
    ours = own(results)
    numbers = {result.rung.name: number for number, result in enumerate(ours, start=1)}
    published = {("published", ladder.published_on): [result.rung.published for result in ours]}
    here = {("measured", device): [figures_of(result.measured, ladder) for result in ours],
            ("predicted", device): [figures_of(result.predicted, ladder) for result in ours]}
    if run.scale == "full":
        here = published | here
    there = {}
    if gpu is not None:
        there = published | {("predicted", gpu): [figures_of(result.full, ladder) for result in ours]}
    driver = run.machine.kind != "cpu" and ladder.published_memory == "driver"
    texts = {"seconds": "the median of those measured", "memory": "the most that the driver reports for the process"
             if driver else "the most that the allocator held in a step"}
    found = [_compared(f"{size}{figure}", [f"{number}. {name}" for name, number in numbers.items()],
                       {who: [getattr(each, figure) for each in figures] for who, figures in series.items()}, figure,
                       texts[figure], ladder)
             for size, series in (("", here), ("full-", there)) for figure in UNITS]
    return [*filter(None, found), *_throughput(results, numbers)]


def _compared(name: str, rungs: Sequence[str], series: Series, figure: str, text: str, ladder: Ladder) -> Chart | None:
    """Bars of each rung, and their table with differences in percent: of each series from the one before it, where both
    are of the same card. A rung without any figure is left out; None where no series has one.

    rungs: numbered names, so that no two are the same. figure: of UNITS.
    """
    series = {who: values for who, values in series.items() if any(values)}
    if not series:
        return None
    kept = [at for at, values in enumerate(zip(*series.values(), strict=True)) if any(values)]
    series = {who: [values[at] for at in kept] for who, values in series.items()}
    names = [rungs[at] for at in kept]
    cards = {(who, device): ladder.published_card if who == "published" else card_name(device)
             for who, device in series}
    between = [(first, second) for first, second in pairwise(series) if cards[first] == cards[second]]
    title, unit, form = UNITS[figure]
    columns = [["-" if value is None else f"{value / unit:{form}}" for value in values] for values in series.values()]
    columns += [["-" if a is None or b is None else relative(a, b) for a, b in zip(*pair, strict=True)]
                for pair in ((series[first], series[second]) for first, second in between)]
    sources = [", ".join(who) for who in series]

    made = go.Figure()
    labels = ["<br>".join(map(label_of, textwrap.wrap(rung, ROW_LETTERS, max_lines=MOST_ROWS, placeholder=" …")))
              for rung in names]
    for source, ((who, _), values) in zip(sources, series.items(), strict=True):
        made.add_bar(y=labels, x=[None if v is None else v / unit for v in values], orientation="h",
                     name=label_of(source), marker={"color": COLOURS[who]}, hovertemplate=f"%{{x:{form}}}")
    made.update_layout(barmode="group", xaxis={"title": title, "rangemode": "tozero"},
                       yaxis={"autorange": "reversed", "automargin": True, "tickfont": {"size": 11}})
    return Chart(name=name, figure=styled(made, 130 + max(46, 14 * len(series) + 12) * len(names)),
                 text=f"{title}: {text}. {'; '.join(sources)}.",
                 heads=("rung", *sources, *(f"{second[0]} differs from {first[0]} by" for first, second in between)),
                 rows=list(zip(names, *columns, strict=True)))


def _throughput(results: Sequence[RungResult], numbers: dict[str, int]) -> list[Chart]:
    """Samples a second against memory, a point for each result that ran, by its rung's number, and our own front; none
    where nothing ran."""
    best = front(results)
    ran = sorted((each for each in results if each.ran), key=lambda each: (each.memory_bytes, each.samples_per_second))
    if not ran:
        return []
    # numbers stand on either side in turn, so that those of points near each other can be read
    sides = {result.name: ("top left", "top right")[at % 2] for at, result in enumerate(ran)}
    made = go.Figure()

    def points(shown: list[RungResult], name: str, mode: str, **look: Any) -> None:
        made.add_scatter(
            x=[result.memory_bytes / MIB for result in shown], y=[result.samples_per_second for result in shown],
            name=name, mode=mode, text=[str(numbers[result.rung.name]) for result in shown],
            textposition=[sides[result.name] for result in shown],
            customdata=[label_of(result.name) for result in shown],
            hovertemplate="%{text}. %{customdata}<br>%{y:.4g} samples/s, %{x:,.0f} MiB<extra></extra>", **look,
        )  # fmt: skip

    points(best, "on the front", "lines+markers+text", line={"shape": "hv", "color": FRONT_COLOUR, "width": 2},
           marker={"size": 11, "color": FRONT_COLOUR})
    points([result for result in ran if result.runner == OURS and result not in best], "others", "markers+text",
           marker={"size": 10, "color": COLOURS["measured"]})
    points([result for result in ran if result.runner != OURS], "peers", "markers",
           marker={"size": 9, "symbol": "x-thin", "line": {"width": 2, "color": COLOURS["published"]}})
    made.update_layout(xaxis={"title": "Peak memory, MiB"}, yaxis={"title": "Samples a second"})
    rows = [(f"{numbers[result.rung.name]}. {result.name}", f"{result.samples_per_second:,.4g}",
             f"{result.memory_bytes / MIB:,.0f} MiB", "yes" if result in best else "")
            for result in results if result.ran]
    named = "; ".join(f"{numbers[result.rung.name]}. {result.rung.name}" for result in best)
    text = (f"On the Pareto front, from the least memory to the most samples a second: {named}. None of the others is "
            "faster without taking more memory.")
    return [Chart(name="throughput", figure=styled(made, 440), text=text,
                  heads=("rung", "samples/s", "memory", "on the front"), rows=rows)]

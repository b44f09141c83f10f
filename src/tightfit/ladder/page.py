"""A ladder as one HTML page that opens offline (page.html.jinja), and its charts as a picture."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from tightfit.devices import MIB
from tightfit.errors import RecipeError
from tightfit.files import replacing
from tightfit.ladder import charts
from tightfit.ladder.cards import card_name, published_card
from tightfit.ladder.catalogue import guides
from tightfit.ladder.peers import title_of
from tightfit.ladder.results import (
    QUANTILES,
    RungResult,
    effects,
    figures_of,
    front,
    heading,
    inverse,
    own,
    quantiles,
    rung_results,
    spreads,
    times,
)
from tightfit.ladder.rows import OURS, Measured
from tightfit.ladder.run import LadderRun
from tightfit.ladder.rungs import Ladder
from tightfit.ladder.table import cells, notes

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, DRAWING = 1100, 120.0
"""Pixels of a picture, and seconds that drawing it may take."""
CHARTS = {"seconds": "Time of a step", "memory": "Memory", "full-seconds": "Time of a step at full size",
          "full-memory": "Memory at full size", "throughput": "Throughput against memory"}  # fmt: skip
"""The charts of a page, in its order."""


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
        return CHARTS[self.name]

    @property
    def html(self) -> str:
        """The chart's element and script; plotly's own library stands elsewhere."""
        made: str = self.figure.to_html(full_html=False, include_plotlyjs=False, div_id=f"{self.name}-chart",
                                        config={"responsive": True, "displaylogo": False})
        return made


def write_page(path: Path, run: LadderRun) -> None:
    """Write the page of what is known of a ladder so far, whole or not at all. Raises OSError."""
    made = page(run)
    with replacing(path) as temporary:
        temporary.write_text(made, "utf-8")


def page(run: LadderRun) -> str:
    """The page of what is known of a ladder so far."""
    results, ladder = rung_results(run), run.options.ladder
    heads, rows = cells(results, ladder)
    ours, best = own(results), front(results, ladder)
    peers = [result for result in results if result.runner != OURS]
    measured = [result.measured for result in results if result.measured is not None]
    dates = sorted(row.date[:16].replace("T", " ") for row in measured)
    return _render(
        "page", title=ladder.title, run=run, heading=heading(run)[1:], heads=heads, rows=rows, charts=draw(run),
        ran=sum(result.ran for result in ours), every=len(ours), best=best,
        least=_mib(best[0], ladder) if best else "-",
        changes=[(result.rung.name, _yaml(result.rung.changes), result.rung.against or "") for result in ours],
        guides=guides().guides, effects=effects(results), spreads=spreads(results), quantiles=QUANTILES,
        peers=[(result.rung.name, title_of(result.runner), result.other_work, _steps(result.baseline),
                _steps(result.measured), times(inverse(result.speed)) or "-", times(inverse(result.memory)) or "-")
               for result in peers],
        missing=[reason for result in results for reason in _missing(result)], notes=notes(results),
        guesses=dict.fromkeys(note for result in results for row in (result.predicted, result.full)
                              if row is not None for note in row.notes),
        dates=f"{dates[0]} to {dates[-1]} UTC" if dates else "-",
        commits=sorted({row.commit for row in measured if row.commit}),
        steps=sorted({f"{len(row.seconds)} of {len(row.losses)}" for row in measured if row.seconds}),
    )  # fmt: skip


def draw(run: LadderRun) -> list[Chart]:
    """The charts that have figures: of the scale that ran, of the full size where it is predicted, of throughput."""
    results, ladder, gpu, device = rung_results(run), run.options.ladder, run.options.gpu, run.machine.device
    ours = own(results)
    numbers = {result.rung.name: number for number, result in enumerate(ours, start=1)}
    published = {("published", ladder.published_on): [ladder.published(result.rung) for result in ours]}
    here = {("measured", device): [figures_of(result.measured, ladder) for result in ours],
            ("predicted", device): [figures_of(result.predicted, ladder) for result in ours]}
    if run.options.scale == "full":
        here = published | here
    there = {}
    if gpu is not None:
        there = published | {("predicted", gpu): [figures_of(result.full, ladder) for result in ours]}
    driver = run.machine.kind != "cpu" and ladder.published_memory == "driver"
    texts = {"seconds": "the median of those measured", "memory": "the most that the driver reports for the process"
             if driver else "the most that the allocator held in a step"}
    found = [_compared(f"{size}{figure}", [f"{number}. {name}" for name, number in numbers.items()],
                       {who: [getattr(each, figure) for each in figures] for who, figures in series.items()}, figure,
                       texts[figure], published_card(ladder))
             for size, series in (("", here), ("full-", there)) for figure in charts.UNITS]
    return [*filter(None, found), *_throughput(results, ladder, numbers)]


def _compared(name: str, rungs: Sequence[str], series: charts.Series, figure: str, text: str,
              published: str) -> Chart | None:  # fmt: skip
    """Bars, and their table with differences in percent: of each series from the one before it, where both are of the
    same card. A rung without any figure is left out; None where no series has one. published: that card's name."""
    series = {who: values for who, values in series.items() if any(values)}
    if not series:
        return None
    kept = [at for at, values in enumerate(zip(*series.values(), strict=True)) if any(values)]
    series = {who: [values[at] for at in kept] for who, values in series.items()}
    names = [rungs[at] for at in kept]
    cards = {(who, device): published if who == "published" else card_name(device) for who, device in series}
    between = [(first, second) for first, second in pairwise(series) if cards[first] == cards[second]]
    title, unit, form = charts.UNITS[figure]
    columns = [["-" if value is None else f"{value / unit:{form}}" for value in values] for values in series.values()]
    columns += [list(map(_difference, series[first], series[second])) for first, second in between]
    said = [", ".join(who) for who in series]
    return Chart(name=name, figure=charts.bars(names, series, figure), text=f"{title}: {text}. {'; '.join(said)}.",
                 heads=("rung", *said, *(f"{second[0]} differs from {first[0]} by" for first, second in between)),
                 rows=list(zip(names, *columns, strict=True)))


def _difference(first: float | None, second: float | None) -> str:
    return "-" if not first or second is None else f"{100 * (second - first) / first:+.1f} %"


def _throughput(results: list[RungResult], ladder: Ladder, numbers: dict[str, int]) -> list[Chart]:
    ran, best = [result for result in results if result.ran], front(results, ladder)
    if not ran:
        return []
    rows = [(f"{numbers[result.rung.name]}. {result.name}",
             f"{result.measured.samples_per_second:,.4g}" if result.measured else "-",
             _mib(result, ladder), "yes" if result in best else "")
            for result in ran]
    named = "; ".join(f"{numbers[result.rung.name]}. {result.rung.name}" for result in best)
    text = (f"On the Pareto front, from the least memory to the most samples a second: {named}. None of the others is "
            "faster without taking more memory.")
    return [Chart(name="throughput", figure=charts.throughput(results, ladder, numbers), text=text,
                  heads=("rung", "samples/s", "memory", "on the front"), rows=rows)]


def _mib(result: RungResult, ladder: Ladder) -> str:
    return f"{(figures_of(result.measured, ladder).memory or 0) / MIB:,.0f} MiB"


def _missing(result: RungResult) -> list[tuple[str, str, str]]:
    """Rows on what did not run or was not predicted: name, state, reason."""
    rows, ran = list[tuple[str, str, str]](), result.measured
    if ran is None or ran.status != "done":
        rows.append((result.name, "not run yet", "") if ran is None else (result.name, ran.status, ran.reason))
    words = {"": "not predicted", "no": "predicted not to fit"}
    for where, row in (("", result.predicted), (" at full size", result.full)):
        if row is not None and row.fits in words:
            rows.append((result.name, words[row.fits] + where, row.reason))
    return rows


def _steps(row: Measured | None) -> str:
    """The median of a row's timed steps and, in brackets, their quartiles."""
    if row is None or not row.seconds:
        return "-"
    _, low, middle, high, _ = quantiles(row.seconds)
    return f"{middle:.4g} ({low:.4g} to {high:.4g})"


def _yaml(changes: Any) -> str:
    """A rung's changes as a recipe writes them, in one row."""
    text: str = yaml.safe_dump(dict(changes), default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.strip().removeprefix("{").removesuffix("}")


def _render(name: str, **values: Any) -> str:
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                              finalize=lambda value: charts.printable(value) if type(value) is str else value)
    environment.filters["times"] = times
    source = resources.files(__package__).joinpath(f"{name}.html.jinja").read_text("utf-8")
    return environment.from_string(source).render(plotly=get_plotlyjs().replace("</script", "<\\/script"), **values)


def check_picture(path: Path) -> str:
    """The browser that draws a picture. Raises RecipeError for a suffix that is not .png, and where there is none."""
    if path.suffix.lower() != ".png":
        raise RecipeError(f"picture: {path} ends in {path.suffix!r}; write a name that ends in .png")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise RecipeError("picture: drawing one needs Chromium or Chrome, and neither is on the PATH; install one, or "
                          "save a chart of the page by the camera above it")
    return browser


def save_picture(path: Path, run: LadderRun) -> None:
    """Draw the page's charts into a PNG, whole or not at all, by a browser without a window.

    Raises as `check_picture` does, and OSError where it cannot be drawn or written.
    """
    browser = check_picture(path)
    shown = [chart for chart in draw(run) if not chart.name.startswith("full")]
    title, machine, *_ = heading(run)
    height = 110 + sum(60 + chart.figure.layout.height for chart in shown)
    with tempfile.TemporaryDirectory(prefix="tightfit-picture-") as folder, replacing(path) as temporary:
        source, picture = Path(folder) / "picture.html", Path(folder) / "picture.png"
        source.write_text(_render("picture", title=title, machine=machine, charts=shown), "utf-8")
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                 f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{height}", f"--screenshot={picture}",
                 source.as_uri()]
        with contextlib.suppress(subprocess.TimeoutExpired):  # without a picture, copying it raises
            subprocess.run(words, check=False, capture_output=True, timeout=DRAWING)
        shutil.copyfile(picture, temporary)

"""A ladder as one HTML page that opens offline (page.html.jinja), and its charts as a picture."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tightfit.devices import MIB
from tightfit.errors import RecipeError
from tightfit.files import replacing, write_atomically
from tightfit.ladder.catalogue import guides
from tightfit.ladder.charts import draw
from tightfit.ladder.peers import title_of
from tightfit.ladder.results import (
    QUANTILES,
    Effect,
    RungResult,
    effects,
    figures_of,
    front,
    heading,
    own,
    rung_results,
    spreads,
    times,
)
from tightfit.ladder.run import LadderRun
from tightfit.ladder.table import cells, notes
from tightfit.page import render

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, DRAWING = 1100, 120.0
"""Pixels of a picture, and seconds that drawing it may take."""


def write_page(path: Path, run: LadderRun) -> None:
    """Write the page of what is known of a ladder so far, whole or not at all. Raises OSError."""
    write_atomically(path, page(run))


def page(run: LadderRun) -> str:
    """The page of what is known of a ladder so far."""
    results, ladder, charts = rung_results(run), run.ladder, draw(run)
    heads, rows = cells(results, ladder)
    ours, best = own(results), front(results, ladder)
    ratios = [(f"{spread.ratio}, {title_of(spread.peer)}", spread.rungs, *map(times, spread.values))
              for spread in spreads(results)]
    figures = [{"name": "rungs that ran", "text": f"{sum(result.ran for result in ours)} of {len(ours)}", "remark": ""}]
    if best and (fastest := best[-1].measured) is not None:
        least = (figures_of(best[0].measured, ladder).memory or 0) / MIB
        figures += [{"name": "fastest", "text": f"{fastest.samples_per_second:.4g} samples/s",
                     "remark": best[-1].rung.name},
                    {"name": "least memory", "text": f"{least:,.0f} MiB", "remark": best[0].rung.name}]
    sections = {"ladder": "Ladder", **{chart.name: chart.title for chart in charts},
                "features": "What each technique gives", **({"peers": "Ours against peers'"} if ratios else {}),
                "about": "About this ladder"}
    return render(
        __package__ or "", "page.html.jinja", title=ladder.title, run=run, heading=heading(run)[1:], heads=heads,
        rows=rows, charts=charts, figures=figures, sections=sections,
        contents=list(sections.items()),
        changes=[(result.rung.name, _yaml(result.rung.changes), result.rung.against or "") for result in ours],
        guides=guides().guides, techniques=[_technique(effect) for effect in effects(results)],
        quantiles=QUANTILES, ratios=ratios, facts=_facts(run, results), notes=notes(results),
    )  # fmt: skip


def _facts(run: LadderRun, results: list[RungResult]) -> list[tuple[str, str]]:
    """The machine, its versions, and when the rungs ran."""
    machine, measured = run.machine, [result.measured for result in results if result.measured is not None]
    dates = sorted(row.date[:16].replace("T", " ") for row in measured)
    commits = sorted({row.commit for row in measured if row.commit})
    steps = sorted({f"{len(row.seconds)} of {len(row.losses)}" for row in measured if row.seconds})
    return [("device", machine.device), ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
            ("driver", machine.driver or "-"), *machine.versions.items(), ("commit", ", ".join(commits) or "-"),
            ("measured", f"{dates[0]} to {dates[-1]} UTC" if dates else "-"),
            ("steps of a rung that were timed", "; ".join(steps) or "-")]


def _technique(effect: Effect) -> tuple[str, ...]:
    """A row of the guides' table."""
    shown = [f"{result.rung.name} against {result.rung.against}: {times(result.speed) or '-'}, "
             f"{times(result.memory) or '-'}" for result in effect.shown]
    return (effect.feature, ", ".join(effect.words.speed), effect.speed, ", ".join(effect.words.memory), effect.memory,
            "; ".join(shown) or "no rung here", effect.words.also)


def _yaml(changes: Any) -> str:
    """A rung's changes as a recipe writes them, in one row."""
    text: str = yaml.safe_dump(dict(changes), default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.strip().removeprefix("{").removesuffix("}")


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
        source.write_text(render(__package__ or "", "picture.html.jinja", title=title, machine=machine, charts=shown),
                          "utf-8")
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                 f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{height}", f"--screenshot={picture}",
                 source.as_uri()]
        with contextlib.suppress(subprocess.TimeoutExpired):  # without a picture, copying it raises
            subprocess.run(words, check=False, capture_output=True, timeout=DRAWING)
        shutil.copyfile(picture, temporary)

"""A ladder as one HTML page that opens offline (page.html.jinja)."""

from __future__ import annotations

from typing import Any

import yaml

from tightfit.devices import MIB
from tightfit.ladder.catalogue import guides
from tightfit.ladder.charts import draw
from tightfit.ladder.peers import title_of
from tightfit.ladder.results import (
    QUANTILES,
    Effect,
    RungResult,
    effects,
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


def page(run: LadderRun) -> str:
    """The page of what is known of a ladder so far."""
    results, ladder, charts = rung_results(run), run.ladder, draw(run)
    heads, rows = cells(results)
    ours, best = own(results), front(results)
    ratios = [(f"{spread.ratio}, {title_of(spread.peer)}", spread.rungs, *map(times, spread.values))
              for spread in spreads(results)]
    figures = [{"name": "rungs that ran", "text": f"{sum(result.ran for result in ours)} of {len(ours)}", "remark": ""}]
    if best:
        least, fastest = best[0], best[-1]
        figures += [{"name": "fastest", "text": f"{fastest.samples_per_second:.4g} samples/s",
                     "remark": fastest.rung.name},
                    {"name": "least memory", "text": f"{least.memory_bytes / MIB:,.0f} MiB", "remark": least.rung.name}]
    sections = {"ladder": "Ladder", **{chart.name: chart.title for chart in charts},
                "features": "What each technique gives", **({"peers": "Ours against peers'"} if ratios else {}),
                "about": "About this ladder"}
    return render(
        __package__ or "", "page.html.jinja", title=ladder.title, run=run, heading=heading(run)[1:], heads=heads,
        rows=rows, charts=charts, figures=figures, sections=sections,
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

"""The page's sections, each from the ladder's lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import yaml

from tightfit.ladder import figures
from tightfit.ladder.climbs import Climb
from tightfit.ladder.comparisons import (
    QUANTILES,
    Told,
    front,
    memory_of,
    numbers,
    own,
    quantiles,
    ran,
    ratios,
    spread,
    told_at_full_size,
)
from tightfit.ladder.effects import effects
from tightfit.ladder.lines import Line, heading, times
from tightfit.ladder.peers import title_of
from tightfit.ladder.published import GUIDES
from tightfit.ladder.rows import OURS, Measured
from tightfit.ladder.rungs import Ladder
from tightfit.ladder.table import cells, remarks
from tightfit.reporting.report.markup import Html, bullets, chart, folded, paragraph, prose, section, table, tiles
from tightfit.reporting.report.wording import relative, seconds_text, size

UNFIT = {"": "not predicted", "no": "predicted not to fit"}
"""What is said of a prediction that has no figures, or is of more than the device has."""


@dataclass
class View:
    """What the sections are drawn from. charts: figures by the name of their place; sections add theirs."""

    climb: Climb
    shown: list[Line]
    charts: dict[str, Any] = field(default_factory=dict)

    @property
    def ladder(self) -> Ladder:
        return self.climb.asked.ladder

    @property
    def names(self) -> dict[str, str]:
        """Each rung as charts and tables have it, by its name: with its number."""
        return {name: f"{number}. {name}" for name, number in numbers(self.shown).items()}

    @property
    def account(self) -> str:
        """Whose figures of memory are shown."""
        if self.climb.machine.kind == "cpu" or self.ladder.published_memory == "allocator":
            return "the most that the allocator held in a step"
        return "the most that the driver reports for the process"

    def chart(self, name: str, figure: Any, label: str) -> Html:
        self.charts[name] = figure
        return chart(name, label)


def ladder_section(view: View) -> Html:
    """The heading, the best of it, and every rung's figures."""
    heads, rows = cells(view.shown, view.ladder)
    changes = [(line.rung.name, _yaml(line.rung.changes), line.rung.against or "") for line in own(view.shown)]
    return section(
        "ladder", "Ladder", tiles(_best(view)), bullets(heading(view.climb)[1:]),
        table("The rungs; speed and memory are factors of the rung that each stands against", heads, rows),
        folded("What each rung changes", table("Fields of the recipe", ("rung", "changes", "stands against"), changes,
                                               left=3)),
    )  # fmt: skip


def _best(view: View) -> Iterator[tuple[str, str, str]]:
    best, every = front(view.shown, view.ladder), own(view.shown)
    yield "rungs that ran", f"{len(ran(every))} of {len(every)}", ""
    if best:
        yield "fastest", f"{_rate(best[-1])} samples/s", best[-1].rung.name
        yield "least memory", _peak(best[0], view), best[0].rung.name


def compared(view: View, name: str, figures_told: Told, *, bytes_: bool) -> Html:
    """Bars, and the same as a table."""
    what = f"memory: {view.account}" if bytes_ else "seconds of a step, the median of those measured"
    if not figures_told:
        return paragraph("Nothing is known yet.")
    return Html(paragraph(f"{what[:1].upper()}{what[1:]}.") + _bars(view, name, what, figures_told, bytes_))


def _bars(view: View, name: str, what: str, figures_told: Told, bytes_: bool) -> Html:
    """A chart and its table, with differences in percent: of each from the one before it, where both are of the same
    card. A rung of which nothing is told is left out."""
    named = [rung for rung, *values in zip(view.names.values(), *figures_told.values(), strict=True) if any(values)]
    kept = {who: [value for value, known in zip(values, _known(figures_told), strict=True) if known]
            for who, values in figures_told.items()}
    between = [(first, second) for first, second in pairwise(kept) if first.card == second.card]
    rows = []
    for place, rung in enumerate(named):
        differences = [_difference(kept[first][place], kept[second][place]) for first, second in between]
        rows.append((rung, *(_words(values[place], bytes_) for values in kept.values()), *differences))
    return Html(
        view.chart(f"{name}-chart", figures.bars_figure(named, kept, bytes_),
                   f"By rung, {what}: {'; '.join(map(str, kept))}. The table below holds it.")
        + table(f"By rung, {what}", ("rung", *map(str, kept), *(f"{second.who} differs from {first.who} by"
                                                                for first, second in between)), rows)
    )  # fmt: skip


def _known(figures_told: Told) -> list[bool]:
    return [any(values) for values in zip(*figures_told.values(), strict=True)]


def _words(value: float | None, bytes_: bool) -> str:
    if value is None:
        return "-"
    return size(int(value)) if bytes_ else seconds_text(value)


def _difference(first: float | None, second: float | None) -> str:
    return "-" if first is None or second is None else relative(first, second)


def full_size_section(view: View) -> Html:
    """What was published and what is predicted for the card that was asked for, where another size ran."""
    asked = view.climb.asked
    seconds, memory = told_at_full_size(view.shown, view.climb)
    if not (seconds or memory) or (asked.scale == "full" and asked.gpu is None):
        return Html("")
    parts = [paragraph("None of this ran here: it is of the full size, and what is measured above is of a smaller one."
                       if asked.scale != "full" else "Predicted for another card than the one that ran.")]
    for name, title, what, figures_told, bytes_ in (
        ("full-time", "Time of a step", "seconds of a step at full size", seconds, False),
        ("full-memory", "Memory", "memory at full size, by the account that was published", memory, True),
    ):
        if figures_told:
            parts += [Html(f"<h3>{title}</h3>"), _bars(view, name, what, figures_told, bytes_)]
    return section("full", "At full size", *parts)


def front_section(view: View) -> Html:
    if not ran(view.shown):
        return Html("")
    best = front(view.shown, view.ladder)
    rows = [(view.names[line.rung.name] + ("" if line.runner == OURS else f" ({title_of(line.runner)})"), _rate(line),
             _peak(line, view), "yes" if line in best else "") for line in ran(view.shown)]
    named = "; ".join(view.names[line.rung.name] for line in best)
    return section(
        "front", "Throughput against memory",
        paragraph(f"On the Pareto front, from the least memory to the most samples a second: {named}. "
                  "None of the others is faster without taking more memory."),
        view.chart("front-chart", figures.front_figure(view.shown, view.ladder),
                   f"Samples a second against memory, and the Pareto front: {named}. The table below holds it."),
        table(f"Throughput and memory ({view.account})", ("rung", "samples/s", "memory", "on the front"), rows),
    )  # fmt: skip


def features_section(view: View) -> Html:
    """The guides' table, with factors."""
    found = effects(view.shown)
    rows = [(each.feature, ", ".join(each.words.speed), each.speed, ", ".join(each.words.memory), each.memory,
             _shown_by(len(each.shown)), each.words.also) for each in found]
    each_rung = [(each.feature, shown.rung, shown.against, times(shown.speed) or "-", times(shown.memory) or "-")
                 for each in found for shown in each.shown]
    return section(
        "features", "What each technique gives",
        paragraph("The guides say whether a technique improves speed and memory; beside their words stands what was "
                  "measured here: samples a second and peak memory, each as a factor of the rung without the "
                  "technique. Above 1 is faster, and more memory."),
        paragraph(f"The guides, in the order of their words: {'; '.join(GUIDES)}."),
        table("Features", ("technique", "guides: speed", "measured speed", "guides: memory", "measured memory",
                           "shown by", "guides also say"), rows, left=7),
        table("The rungs that show them", ("technique", "rung", "against", "speed", "memory"), each_rung, left=3),
    )  # fmt: skip


def _shown_by(count: int) -> str:
    return "no rung here" if not count else "1 rung" if count == 1 else f"{count} rungs"


def peers_section(view: View) -> Html:
    """Ours against other trainers', rung by rung, and over the rungs that are the same work."""
    found = ratios(view.shown)
    if not found:
        return Html("")
    rows = [(each.line.rung.name, title_of(each.line.runner), each.line.same_work, _steps(each.line.baseline),
             _steps(each.line.measured), times(each.speed) or "-", times(each.memory) or "-") for each in found]
    over = [(f"{each.what}, {title_of(each.peer)}", f"{each.count:,}", *map(times, each.values))
            for each in spread(found)]
    return section(
        "peers", "Ours against peers'",
        paragraph("Speed: our samples a second in theirs, above 1 where ours is faster. Memory: our peak in theirs, "
                  "below 1 where ours takes less. A step that is not the same work, by its losses, is marked."),
        table("By rung; seconds of a step, in brackets their quartiles",
              ("rung", "peer", "marked", "ours", "theirs", "speed", "memory"), rows, left=3),
        table("Over the rungs that are the same work", ("ratio", "rungs", *QUANTILES), over),
    )  # fmt: skip


def _steps(row: Measured | None) -> str:
    if row is None or not row.seconds:
        return "-"
    _, low, middle, high, _ = quantiles(row.seconds)
    return f"{seconds_text(middle)} ({seconds_text(low)} to {seconds_text(high)})"


def missing_section(view: View) -> Html:
    """What did not run or was not predicted, and why."""
    rows: list[tuple[str, str, str]] = []
    for line in view.shown:
        if line.measured is None:
            rows.append((line.name, "not run yet", ""))
        elif line.measured.status != "done":
            rows.append((line.name, line.measured.status, prose(line.measured.reason)))
        for where, found in (("", line.predicted), (" at full size", line.full)):
            if found is not None and found.fits in UNFIT:
                rows.append((line.name, UNFIT[found.fits] + where, prose(found.reason)))
    return section("missing", "What did not run, and why", table("Rungs without figures", ("rung", "what", "why"), rows,
                                                                 left=3)) if rows else Html("")


def about_section(view: View) -> Html:
    climb = view.climb
    machine = climb.machine
    rows = [line.measured for line in view.shown if line.measured is not None]
    dates = sorted(str(row.date)[:16].replace("T", " ") for row in rows)
    steps = sorted({f"{len(row.seconds)} of {len(row.losses)}" for row in rows if row.seconds})
    facts = [
        ("device", machine.device), ("memory", size(machine.memory_bytes)), ("driver", machine.driver or "-"),
        *((name, version) for name, version in machine.versions.items()),
        ("commit", ", ".join(sorted({str(row.commit) for row in rows if row.commit})) or "-"),
        ("measured", f"{dates[0]} to {dates[-1]} UTC" if dates else "-"),
        ("steps of a rung that were timed", "; ".join(steps) or "-"),
    ]  # fmt: skip
    said = dict.fromkeys(f"{line.name}: {said}" for line in view.shown for said in remarks(line))
    guessed = dict.fromkeys(f"predicted: {note}" for line in view.shown
                            for row in (line.predicted, line.full) if row is not None for note in row.notes)
    return section(
        "about", "About this ladder", table("Machine, versions, dates", ("what", "which"), facts, left=2),
        folded("Notes on rungs", bullets([*said, *guessed])) if said or guessed else Html(""),
        bullets(climb.rows.skipped),
    )  # fmt: skip


def _rate(line: Line) -> str:
    return f"{line.measured.samples_per_second:,.4g}" if line.measured is not None else "-"


def _peak(line: Line, view: View) -> str:
    return size(int(memory_of(line.measured, view.ladder) or 0))


def _yaml(changes: Any) -> str:
    """A rung's changes as a recipe writes them, in one row."""
    if not changes:
        return ""
    text: str = yaml.safe_dump(dict(changes), default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.strip().removeprefix("{").removesuffix("}")

"""A ladder as a picture for a README: time and memory of each rung, and throughput against memory."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightfit.errors import MissingLibrary, RecipeError
from tightfit.files import replacing
from tightfit.ladder.climbs import Climb
from tightfit.ladder.comparisons import Told, front, numbers, own, place, ran, told
from tightfit.ladder.figures import FRONT, colour
from tightfit.ladder.lines import Line, heading, lines
from tightfit.ladder.rungs import Ladder
from tightfit.reporting.report.wording import byte_unit, time_unit

FORMATS = (".png", ".svg")
WRAPPED = 34
"""Letters of a row of a rung's name."""


def check_picture(path: Path) -> None:
    """Raise RecipeError for a suffix of no format that can be drawn, MissingLibrary without matplotlib."""
    if path.suffix.lower() not in FORMATS:
        raise RecipeError(f"picture: {path} ends in {path.suffix!r}; write a name that ends in {' or '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingLibrary("matplotlib", "a picture of a ladder", "matplotlib")


def save_picture(path: Path, climb: Climb) -> None:
    """Draw the ladder into a PNG or an SVG file, whole or not at all.

    Raises as `check_picture` does, and OSError where it cannot be written.
    """
    check_picture(path)
    import matplotlib
    from matplotlib.figure import Figure

    shown, ladder = lines(climb), climb.asked.ladder
    names = [f"{number}. {name}" for name, number in numbers(shown).items()]
    seconds, memory = told(shown, climb)
    with matplotlib.rc_context({"svg.hashsalt": ladder.name, "font.size": 9, "axes.spines.top": False,
                                "axes.spines.right": False, "text.parse_math": False}):  # fmt: skip
        bars, points = 0.9 + 0.42 * len(names), 3.6
        figure = Figure(figsize=(11, bars + points), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(bars, points))
        above, below = parts
        left, right = above.subplots(1, 2, sharey=True)
        _bars(left, names, seconds, bytes_=False)
        _bars(right, names, memory, bytes_=True)
        if seconds or memory:
            who = (left if seconds else right).get_legend_handles_labels()
            above.legend(*who, loc="outside lower center", ncols=3, frameon=False)
        _front(below.subplots(), shown, ladder)
        title, machine, *_ = heading(climb)
        shape = "" if climb.asked.scale == "full" else f" ({climb.asked.scale} shape)"
        above.suptitle(f"{title}{shape}\n{machine}", fontsize=11)
        with replacing(path) as temporary:
            kind = path.suffix.lower()[1:]
            figure.savefig(temporary, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)


def _bars(axis: Any, names: Sequence[str], figures_told: Told, *, bytes_: bool) -> None:
    known = [value for values in figures_told.values() for value in values if value is not None]
    unit, each = (byte_unit if bytes_ else time_unit)(known)
    thick = 0.8 / max(len(figures_told), 1)
    for at, (who, values) in enumerate(figures_told.items()):
        places = [number - 0.4 + thick * (at + 0.5) for number in range(len(names))]
        axis.barh(places, [(value or 0.0) / each for value in values], thick, label=str(who), color=colour(who.who))
    axis.set_yticks(range(len(names)), [textwrap.fill(name, WRAPPED) for name in names])
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set(xlabel=unit, title="peak memory" if bytes_ else "time of a step")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def _front(axis: Any, shown: Sequence[Line], ladder: Ladder) -> None:
    """Points by number; those of the front are joined, and named beside the drawing."""
    every, best = ran(own(shown)), front(shown, ladder)
    unit, each = byte_unit([place(line, ladder)[0] for line in every])
    number_of = numbers(shown)

    def at(line: Line) -> tuple[float, float]:
        bytes_, rate = place(line, ladder)
        return bytes_ / each, rate

    if best:
        axis.plot(*zip(*map(at, best), strict=True), drawstyle="steps-post", color=FRONT)
    for count, line in enumerate(sorted(every, key=at)):
        left = count % 2 == 0  # numbers on either side in turn, so that those of points near each other can be read
        chosen = line in best
        number = number_of[line.rung.name]
        axis.plot(*at(line), "o", color=FRONT if chosen else colour("measured"), markersize=6,
                  label=textwrap.fill(f"{number}. {line.rung.name}", WRAPPED) if chosen else None)
        axis.annotate(str(number), at(line), xytext=(-6 if left else 6, 4), fontsize=8,
                      textcoords="offset points", ha="right" if left else "left")
    if best:
        axis.legend(title="Pareto front", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axis.set(xlabel=f"peak memory, {unit}", ylabel="samples a second", title="throughput against memory")
    axis.grid(alpha=0.3)
    axis.margins(0.08, 0.12)

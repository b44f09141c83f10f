"""The page's charts, by plotly, in the report's style."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.ladder.comparisons import Told, front, numbers, place, ran
from tightfit.ladder.lines import Line
from tightfit.ladder.rows import OURS
from tightfit.ladder.rungs import Ladder
from tightfit.reporting.report.figures import PAIR, finished, label_of
from tightfit.reporting.report.wording import byte_unit, seconds_text, size, time_unit

PUBLISHED = "#9a9a9a"
FRONT = "#d55e00"
WRAPPED, MOST_ROWS = 24, 3
"""Letters of a row of a rung's name beside its bars, and rows of one."""


def colour(who: str) -> str:
    """The colour of a figure by who tells it."""
    return {"published": PUBLISHED, "measured": PAIR[0]}.get(who, PAIR[1])


def bars_figure(names: Sequence[str], told: Told, bytes_: bool) -> Any:
    """Bars of each rung side by side, the first rung on top.

    names: numbered, so that no two are the same. bytes_: of bytes rather than seconds.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    unit, each = (byte_unit if bytes_ else time_unit)([v for values in told.values() for v in values if v is not None])
    labels = [_wrapped(name) for name in names]
    for who, values in told.items():
        words = ["" if v is None else size(int(v)) if bytes_ else seconds_text(v) for v in values]
        figure.add_bar(y=labels, x=[None if v is None else v / each for v in values], orientation="h",
                       name=label_of(str(who)), marker={"color": colour(who.who)}, text=words, textposition="none",
                       hovertemplate="%{y}: %{text}<extra>%{fullData.name}</extra>")
    figure.update_layout(barmode="group", xaxis={"title": unit if bytes_ else f"{unit} a step", "rangemode": "tozero"},
                         yaxis={"autorange": "reversed", "automargin": True, "tickfont": {"size": 11}})
    return finished(figure, 130 + max(46, 14 * len(told) + 12) * len(names))


def front_figure(shown: Sequence[Line], ladder: Ladder) -> Any:
    """Samples a second against memory, a point for each line that ran, by its rung's number, and the front of our own.
    """
    import plotly.graph_objects as go

    number_of = numbers(shown)
    figure = go.Figure()
    every = ran(shown)
    unit, each = byte_unit([place(line, ladder)[0] for line in every])
    best = front(shown, ladder)
    # numbers stand on either side in turn, so that those of points near each other can be read
    sides = {id(line): ("top left", "top right")[at % 2] for at, line in enumerate(
        sorted(every, key=lambda line: place(line, ladder)))}

    def points(lines: Sequence[Line], name: str, mode: str, **look: Any) -> None:
        if lines:
            figure.add_scatter(
                x=[place(line, ladder)[0] / each for line in lines], y=[place(line, ladder)[1] for line in lines],
                name=name, mode=mode, text=[str(number_of[line.rung.name]) for line in lines],
                textposition=[sides[id(line)] for line in lines],
                customdata=[_about(line, ladder, number_of) for line in lines],
                hovertemplate="%{customdata}<extra></extra>", **look)  # fmt: skip

    points(best, "on the front", "lines+markers+text", line={"shape": "hv", "color": FRONT, "width": 2},
           marker={"size": 11, "color": FRONT})
    points([line for line in every if line.runner == OURS and line not in best], "others", "markers+text",
           marker={"size": 10, "color": PAIR[0], "line": {"width": 1, "color": "#666666"}})
    points([line for line in every if line.runner != OURS], "peers", "markers", marker={
        "size": 9, "symbol": "x-thin", "line": {"width": 2, "color": PUBLISHED}})
    figure.update_layout(xaxis={"title": f"peak memory, {unit}"}, yaxis={"title": "samples a second"})
    return finished(figure, 440)


def _about(line: Line, ladder: Ladder, number_of: Mapping[str, int]) -> str:
    bytes_, rate = place(line, ladder)
    return f"{number_of[line.rung.name]}. {label_of(line.name)}<br>{rate:.4g} samples/s, {size(int(bytes_))}"


def _wrapped(name: str) -> str:
    """A name in short rows, so that it leaves room to draw in."""
    rows = textwrap.wrap(name, WRAPPED, max_lines=MOST_ROWS, placeholder=" …")
    return "<br>".join(label_of(row) for row in rows)

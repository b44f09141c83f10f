"""The page's charts, by plotly. Colours of text and grid serve a light and a dark page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

from tightfit.devices import MIB
from tightfit.ladder.results import RungResult, front, place
from tightfit.ladder.rows import OURS
from tightfit.ladder.rungs import Ladder

COLOURS = {"published": "#9a9a9a", "measured": "#56b4e9", "predicted": "#e8743b"}
FRONT = "#d55e00"
GRID = "rgba(128,128,128,0.3)"
WRAPPED, MOST_ROWS = 24, 3
"""Letters of a row of a rung's name next to its bars, and rows of one."""

UNITS = {"seconds": ("Seconds of a step", 1.0, ".4g"), "memory": ("Peak memory, MiB", float(MIB), ",.0f")}
"""Each figure's axis, its unit in seconds or bytes, and how a value is written."""
Series = dict[tuple[str, str], list[float | None]]
"""A figure of each rung, by who says so (published, measured, predicted) and of which device."""


def printable(text: object) -> str:
    """Text without control characters and marks that turn the direction of text around."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in str(text))


def label(text: object) -> str:
    """A name for plotly, which reads markup in labels."""
    return escape(printable(text), quote=False)


def bars(names: Sequence[str], series: Series, figure: str) -> Any:
    """Bars of each rung side by side, the first rung on top.

    names: numbered, so that no two are the same. figure: of UNITS.
    """
    import plotly.graph_objects as go

    title, unit, form = UNITS[figure]
    made = go.Figure()
    labels = ["<br>".join(map(label, textwrap.wrap(name, WRAPPED, max_lines=MOST_ROWS, placeholder=" …")))
              for name in names]
    for (who, device), values in series.items():
        made.add_bar(y=labels, x=[None if v is None else v / unit for v in values], orientation="h",
                     name=label(f"{who}, {device}"), marker={"color": COLOURS[who]}, hovertemplate=f"%{{x:{form}}}")
    made.update_layout(barmode="group", xaxis={"title": title, "rangemode": "tozero"},
                       yaxis={"autorange": "reversed", "automargin": True, "tickfont": {"size": 11}})
    return _finished(made, 130 + max(46, 14 * len(series) + 12) * len(names))


def throughput(results: Sequence[RungResult], ladder: Ladder, numbers: dict[str, int]) -> Any:
    """Samples a second against memory, a point for each result that ran, by its rung's number, and our own front."""
    import plotly.graph_objects as go

    made, best = go.Figure(), front(results, ladder)
    ran = sorted((result for result in results if result.ran), key=lambda result: place(result, ladder))
    # numbers stand on either side in turn, so that those of points near each other can be read
    sides = {result.name: ("top left", "top right")[at % 2] for at, result in enumerate(ran)}

    def points(shown: list[RungResult], name: str, mode: str, **look: Any) -> None:
        made.add_scatter(
            x=[place(result, ladder)[0] / MIB for result in shown], y=[place(result, ladder)[1] for result in shown],
            name=name, mode=mode, text=[str(numbers[result.rung.name]) for result in shown],
            textposition=[sides[result.name] for result in shown],
            customdata=[label(result.name) for result in shown],
            hovertemplate="%{text}. %{customdata}<br>%{y:.4g} samples/s, %{x:,.0f} MiB<extra></extra>", **look,
        )  # fmt: skip

    points(best, "on the front", "lines+markers+text", line={"shape": "hv", "color": FRONT, "width": 2},
           marker={"size": 11, "color": FRONT})
    points([result for result in ran if result.runner == OURS and result not in best], "others", "markers+text",
           marker={"size": 10, "color": COLOURS["measured"]})
    points([result for result in ran if result.runner != OURS], "peers", "markers",
           marker={"size": 9, "symbol": "x-thin", "line": {"width": 2, "color": COLOURS["published"]}})
    made.update_layout(xaxis={"title": "Peak memory, MiB"}, yaxis={"title": "Samples a second"})
    return _finished(made, 440)


def _finished(figure: Any, height: int) -> Any:
    """A figure that takes its width from the page. height: pixels."""
    figure.update_layout(
        template="none", height=height, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 60, "r": 16, "t": 30, "b": 50}, font={"family": "system-ui, sans-serif", "size": 13},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": COLOURS["published"]},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    )  # fmt: skip
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID)
    return figure

"""The charts, by plotly. Names are escaped: plotly reads markup in labels. Colours of text and grid are the page's.

Each chart's data stands in a table beside it, so that nothing is told by hovering alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tightfit.devices import Device
from tightfit.reporting.plan.memory_bar import PARTS
from tightfit.reporting.report.breakdown import PASSES, Row
from tightfit.reporting.report.markup import UNPRINTABLE
from tightfit.reporting.report.memory import CATEGORIES, MemoryCurve
from tightfit.reporting.report.wording import byte_unit, flops_text, seconds_text, size, time_unit
from tightfit.trace import Category, OpClass, Phase

COLOURS = {part.key: part.colour for part in PARTS}
NAMES = {part.key: part.name for part in PARTS}
PASS_COLOURS = {Phase.FORWARD: "#56b4e9", Phase.RECOMPUTE: "#c9a800", Phase.BACKWARD: "#e69f00",
                Phase.OPTIMIZER: "#1fb58f"}  # fmt: skip
CLASS_COLOURS = dict(zip(OpClass, ("#56b4e9", "#c9a800", "#1fb58f", "#e8743b", "#cc79a7", "#9a9a9a"), strict=True))
PAIR = ("#56b4e9", "#e8743b")
"""Measured beside predicted, or one run beside another."""
FEW = 40
"""Parts of a step whose passes are shaded; more would be a blur."""


def memory_figure(curves: Mapping[str, MemoryCurve], capacity: int) -> Any:
    """Memory over the step: measured as a stack of areas, predicted as the outline of one, on the same axes.

    Where one of them is missing, the other is the areas.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    unit, scale = byte_unit([curve.peak_bytes for curve in curves.values()])
    times, each = time_unit([float(curve.seconds[-1]) for curve in curves.values()])
    solid = "measured" if "measured" in curves else "predicted"
    for name, curve in curves.items():
        x = curve.seconds / each
        for category in CATEGORIES:
            held = curve.held[category]
            if not held.any():
                continue
            figure.add_scatter(
                x=x, y=held / scale, name=f"{name}: {NAMES[category]}", stackgroup=name, mode="lines",
                fill="tonexty" if name == solid else "none", fillcolor=COLOURS[category], legendgroup=category.value,
                line={"shape": "hv", "width": 0.5 if name == solid else 1.5, "color": COLOURS[category],
                      "dash": "solid" if name == solid else "dot"},
                meta=f"{name} {category.value}", text=[size(int(count)) for count in held],
                hovertemplate="%{text}<extra>%{fullData.name}</extra>",
            )  # fmt: skip
        if name != solid:
            figure.add_scatter(x=x, y=curve.total / scale, name=f"{name}: all", mode="lines", hoverinfo="skip",
                               line={"shape": "hv", "width": 2, "color": "#d55e00", "dash": "dash"}, meta=f"{name} all")
    for name, curve in curves.items():
        figure.add_scatter(
            x=[curve.peak_seconds / each], y=[curve.peak_bytes / scale], mode="markers", name=f"{name} peak",
            meta=f"{name} peak", text=[f"{name} peak: {size(curve.peak_bytes)}"],
            hovertemplate="%{text}<extra></extra>",
            marker={"size": 12, "symbol": "diamond" if name == solid else "diamond-open", "color": "#d55e00",
                    "line": {"width": 2, "color": "#d55e00"}},
        )  # fmt: skip
    highest = curves[solid]
    figure.add_annotation(x=highest.peak_seconds / each, y=highest.peak_bytes / scale, showarrow=True, ay=-28, ax=0,
                          text=f"{solid} peak {size(highest.peak_bytes)}")
    if 0 < capacity < 1.5 * max(curve.peak_bytes for curve in curves.values()):
        figure.add_hline(y=capacity / scale, line_dash="dash", line_color="#d55e00", annotation_text="capacity")
    if len(highest.stretches) <= FEW:
        for part in highest.stretches:
            if part.phase is Phase.BACKWARD:
                figure.add_vrect(x0=part.begin / each, x1=part.end / each, fillcolor="#888888", opacity=0.12,
                                 line_width=0, layer="below")
    figure.update_layout(hovermode="x unified", showlegend=False,
                         xaxis={"title": f"{times} since the step began", "hoverformat": ".4~g",
                                "range": [0, max(float(curve.seconds[-1]) for curve in curves.values()) / each]},
                         yaxis={"title": unit, "rangemode": "tozero"})
    return finished(figure, 460)


def pass_figure(rows: Sequence[tuple[str, Mapping[Phase, float]]], label: str) -> Any:
    """Seconds of each row by pass, as stacked horizontal bars, the first row on top."""
    import plotly.graph_objects as go

    figure = go.Figure()
    unit, each = time_unit([sum(row.values()) for _, row in rows])
    names = [label_of(name) for name, _ in rows]
    for phase in PASSES:
        values = [row.get(phase, 0.0) for _, row in rows]
        if any(values):
            figure.add_bar(y=names, x=[v / each for v in values], orientation="h", name=phase.value,
                           marker={"color": PASS_COLOURS[phase]}, text=[seconds_text(v) for v in values],
                           textposition="none", hovertemplate="%{y}: %{text}<extra>%{fullData.name}</extra>")
    figure.update_layout(barmode="stack", xaxis={"title": f"{label}, {unit}"},
                         yaxis={"autorange": "reversed", "automargin": True})
    return finished(figure, 150 + 26 * len(rows))


def pair_figure(names: Sequence[str], first: Sequence[float], second: Sequence[float], words: tuple[str, str],
                bytes_: bool) -> Any:  # fmt: skip
    """Two figures for each name side by side. words: what the two are. bytes_: of bytes rather than seconds."""
    import plotly.graph_objects as go

    figure = go.Figure()
    unit, each = (byte_unit if bytes_ else time_unit)([*first, *second])
    for word, values, colour in zip(words, (first, second), PAIR, strict=True):
        figure.add_bar(x=[label_of(name) for name in names], y=[v / each for v in values], name=label_of(word),
                       marker={"color": colour},
                       text=[size(int(v)) if bytes_ else seconds_text(v) for v in values], textposition="none",
                       hovertemplate="%{x}: %{text}<extra>%{fullData.name}</extra>")
    figure.update_layout(barmode="group", yaxis={"title": unit}, xaxis={"automargin": True})
    return finished(figure, 340)


def roofline_figure(rows: Sequence[Row], device: Device, tf32: bool) -> Any:
    """FLOPs a second against FLOPs for each byte, a point for each kind of op, under the device's own roof.

    The larger a point, the longer its ops take.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    points = [row for row in rows if row.intensity and row.rate]
    longest = max((row.total for row in points), default=0.0)
    for kind in dict.fromkeys(row.op_class for row in points):
        mine = [row for row in points if row.op_class is kind]
        figure.add_scatter(
            x=[row.intensity for row in mine], y=[row.rate for row in mine], mode="markers", name=kind.value,
            marker={"color": CLASS_COLOURS[kind], "line": {"width": 1, "color": "#666666"},
                    "size": [6 + 22 * math.sqrt(row.total / longest) for row in mine]},
            text=[f"{label_of(row.name)} {row.dtype and label_of(row.dtype)}<br>{flops_text(row.rate)}, "
                  f"{seconds_text(row.total)} in {row.runs:,} runs" for row in mine],
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    seen = [row.intensity or 1.0 for row in points] or [1.0]
    for dtype in dict.fromkeys(row.dtype for row in points):
        peak = device.peak(dtype, tf32)
        if peak and device.bandwidth:
            ridge = peak / device.bandwidth
            x = [min(*seen, ridge) / 2, ridge, max(*seen, ridge) * 2]
            figure.add_scatter(x=x, y=[min(peak, i * device.bandwidth) for i in x], mode="lines",
                               name=f"roof, {label_of(dtype)}", hoverinfo="name", line={"width": 2, "dash": "dash"})
    figure.update_layout(xaxis={"type": "log", "dtick": 1, "title": "FLOPs for each byte"},
                         yaxis={"type": "log", "dtick": 1, "title": "FLOPs a second"})
    return finished(figure, 420)


def readings_figure(name: str, series: Sequence[float | None]) -> Any:
    """One series of what the driver said while steps ran, thinned to a few hundred points."""
    import plotly.graph_objects as go

    every = max(len(series) // 500, 1)
    figure = go.Figure()
    figure.add_scatter(x=list(range(0, len(series), every)), y=list(series[::every]), mode="lines", name=label_of(name))
    figure.update_layout(xaxis={"title": "reading"}, yaxis={"title": label_of(name)}, showlegend=False)
    return finished(figure, 220)


def category_colour(category: Category) -> str:
    return COLOURS[category]


def label_of(name: object) -> str:
    """A name as plotly shows it: markup escaped, the middle left out of a long one."""
    shown = str(name)
    if len(shown) > 48:
        shown = f"{shown[:22]}…{shown[-25:]}"
    return escape(UNPRINTABLE.sub("?", shown), quote=False)  # plotly shows other entities as they are written


def finished(figure: Any, height: int) -> Any:
    """A figure that takes its width from the page and its colours of text and grid from the theme. height: pixels."""
    figure.update_layout(
        template="none", height=height, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", autosize=True,
        margin={"l": 60, "r": 16, "t": 30, "b": 50}, font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left", "traceorder": "normal"},
    )  # fmt: skip
    return figure

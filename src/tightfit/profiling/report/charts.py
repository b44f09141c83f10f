"""The report's charts, by plotly; the figures of each stand in a table as well."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from tightfit import text
from tightfit.devices import Device
from tightfit.display.memory_bar import COLOURS
from tightfit.page import label_of, styled
from tightfit.profiling.report.compare import Pair
from tightfit.profiling.report.copies import LANES, Lanes
from tightfit.profiling.report.memory import MemoryCurve
from tightfit.profiling.step import ByPhase, OpGroup
from tightfit.trace import CATEGORY_NAMES, Category, OpClass, Phase

PHASE_COLOURS = {Phase.FORWARD: "#56b4e9", Phase.RECOMPUTE: "#c9a800", Phase.BACKWARD: "#e69f00",
                 Phase.OPTIMIZER: "#1fb58f"}  # fmt: skip
CLASS_COLOURS = dict(zip(OpClass, ("#56b4e9", "#c9a800", "#1fb58f", "#e8743b", "#cc79a7", "#9a9a9a"), strict=True))
PAIR = ("#56b4e9", "#e8743b")
"""The two figures of a pair."""
ACCENT = "#d55e00"
MOST_SHADED = 40
"""The most parts of a step whose backward passes are shaded: more would be a blur."""


def held_categories(curves: Iterable[MemoryCurve]) -> list[Category]:
    """The categories that any of the curves has bytes of."""
    return [category for category in Category if any(curve.held[category].any() for curve in curves)]


def memory_chart(curves: Mapping[str, MemoryCurve], capacity: int) -> Any:
    """Memory over the step: the first curve as a stack of areas, the second as its outline, on the same axes."""
    figure = go.Figure()
    unit, scale = text.byte_unit(curve.peak_bytes for curve in curves.values())
    end = max(float(curve.seconds[-1]) for curve in curves.values())
    times, each = text.time_unit([end])
    solid = next(iter(curves))
    for name, curve in curves.items():
        x, areas = curve.seconds / each, name == solid
        for category in Category:
            held = curve.held[category]
            if held.any():
                figure.add_scatter(
                    x=x, y=held / scale, name=f"{name}: {CATEGORY_NAMES[category]}", stackgroup=name, mode="lines",
                    fill="tonexty" if areas else "none", fillcolor=COLOURS[category], meta=f"{name} {category.value}",
                    line={"shape": "hv", "width": 0.5 if areas else 1.5, "color": COLOURS[category],
                          "dash": "solid" if areas else "dot"},
                    text=[text.size(count) for count in held], hovertemplate="%{text}<extra>%{fullData.name}</extra>",
                )  # fmt: skip
        if not areas:
            figure.add_scatter(x=x, y=curve.total / scale, name=f"{name}: all", mode="lines", hoverinfo="skip",
                               line={"shape": "hv", "width": 2, "color": ACCENT, "dash": "dash"}, meta=f"{name} all")
        figure.add_scatter(
            x=[curve.peak_seconds / each], y=[curve.peak_bytes / scale], mode="markers", name=f"{name} peak",
            meta=f"{name} peak", text=[f"{name} peak: {text.size(curve.peak_bytes)}"],
            hovertemplate="%{text}<extra></extra>",
            marker={"size": 12, "symbol": "diamond" if areas else "diamond-open", "color": ACCENT,
                    "line": {"width": 2, "color": ACCENT}},
        )  # fmt: skip
    first = curves[solid]
    figure.add_annotation(x=first.peak_seconds / each, y=first.peak_bytes / scale, showarrow=True, ay=-28, ax=0,
                          xanchor="left" if first.peak_seconds < 0.1 * end else "center",
                          text=f"{solid} peak {text.size(first.peak_bytes)}")
    if 0 < capacity < 1.5 * max(curve.peak_bytes for curve in curves.values()):
        figure.add_hline(y=capacity / scale, line_dash="dash", line_color=ACCENT, annotation_text="capacity")
    for part in first.parts if len(first.parts) <= MOST_SHADED else ():
        if part.phase is Phase.BACKWARD:
            figure.add_vrect(x0=part.begin / each, x1=part.end / each, fillcolor="#888888", opacity=0.12, line_width=0,
                             layer="below")
    figure.update_layout(hovermode="x unified", showlegend=False, yaxis={"title": unit, "rangemode": "tozero"}, xaxis={
        "title": f"time since the step began, {times}", "hoverformat": ".4~g", "range": [0, end / each]})
    return styled(figure, 460)


def phases_of(rows: Mapping[str, ByPhase]) -> list[Phase]:
    """The phases that any of the rows has seconds in."""
    return [phase for phase in PHASE_COLOURS if any(row[phase] for row in rows.values())]


def lanes_chart(lanes: Mapping[str, Lanes]) -> Any:
    """A chart of a step's lanes at work, over its seconds: a row for each lane of each step, coloured by phase."""
    figure = go.Figure()
    times, each = text.time_unit([max(s.end for found in lanes.values() for s in found.stretches)])
    rows = [f"{called}, {name}" for called in LANES.values() for name in lanes]
    phases = {s.phase: None for found in lanes.values() for s in found.stretches}
    for phase in phases:
        shown = [(f"{LANES[s.stream]}, {name}", s) for name, found in lanes.items() for s in found.stretches
                 if s.phase is phase and s.stream in LANES]
        figure.add_bar(
            y=[row for row, _ in shown], x=[(s.end - s.begin) / each for _, s in shown], orientation="h",
            base=[s.begin / each for _, s in shown], name=phase.value, width=0.7,
            marker={"color": PHASE_COLOURS.get(phase, "#9a9a9a"), "line": {"width": 0}},
            text=[f"{text.seconds(s.begin)} to {text.seconds(s.end)}" for _, s in shown], textposition="none",
            hovertemplate="%{y}: %{text}<extra>%{fullData.name}</extra>",
        )  # fmt: skip
    figure.update_layout(barmode="overlay", xaxis={"title": f"time since the step began, {times}"}, yaxis={
        "categoryorder": "array", "categoryarray": rows[::-1], "automargin": True})
    return styled(figure, 150 + 34 * len(rows))


def phase_chart(rows: Mapping[str, ByPhase]) -> Any:
    """Seconds of each row by phase, as stacked horizontal bars, the first row on top."""
    figure = go.Figure()
    unit, each = text.time_unit(sum(row.values()) for row in rows.values())
    names = [label_of(name) for name in rows]
    for phase in phases_of(rows):
        values = [row[phase] for row in rows.values()]
        figure.add_bar(y=names, x=[value / each for value in values], orientation="h", name=phase.value,
                       marker={"color": PHASE_COLOURS[phase]}, text=[text.seconds(value) for value in values],
                       textposition="none", hovertemplate="%{y}: %{text}<extra>%{fullData.name}</extra>")
    figure.update_layout(barmode="stack", xaxis={"title": f"time, {unit}"},
                         yaxis={"autorange": "reversed", "automargin": True})
    return styled(figure, 150 + 26 * len(rows))


def pair_chart(pairs: Sequence[Pair], names: tuple[str, str], bytes_: bool) -> Any:
    """Two bars for each pair. names: of the two. bytes_: figures are bytes, and not seconds."""
    figure = go.Figure()
    unit, each = (text.byte_unit if bytes_ else text.time_unit)([v for p in pairs for v in (p.first, p.second)])
    shown = text.size if bytes_ else text.seconds
    for name, colour, values in zip(names, PAIR, ([p.first for p in pairs], [p.second for p in pairs]), strict=True):
        figure.add_bar(x=[label_of(pair.name) for pair in pairs], y=[value / each for value in values],
                       name=label_of(name), marker={"color": colour}, text=[shown(value) for value in values],
                       textposition="none", hovertemplate="%{x}: %{text}<extra>%{fullData.name}</extra>")
    figure.update_layout(barmode="group", yaxis={"title": unit}, xaxis={"automargin": True})
    return styled(figure, 340)


def roofline_chart(groups: Sequence[OpGroup], device: Device, tf32: bool) -> Any:
    """FLOPs a second against FLOPs for each byte, a point for each group of ops, under the device's own roof; the
    larger a point, the longer its ops take."""
    figure = go.Figure()
    points = [group for group in groups if group.intensity and group.rate]
    longest = max((group.total for group in points), default=0.0)
    for kind in dict.fromkeys(group.op_class for group in points):
        mine = [group for group in points if group.op_class is kind]
        figure.add_scatter(
            x=[group.intensity for group in mine], y=[group.rate for group in mine], mode="markers", name=kind.value,
            marker={"color": CLASS_COLOURS[kind], "line": {"width": 1, "color": "#666666"},
                    "size": [6 + 22 * math.sqrt(group.total / longest) for group in mine]},
            text=[f"{label_of(group.name)} {group.dtype and label_of(group.dtype)}<br>{text.flops(group.rate)}, "
                  f"{text.seconds(group.total)} in {text.counted(group.runs, 'run')}" for group in mine],
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    seen = [group.intensity or 1.0 for group in points] or [1.0]
    for dtype in dict.fromkeys(group.dtype for group in points):
        peak = device.peak(dtype, tf32)
        if peak and device.bandwidth:
            ridge = peak / device.bandwidth
            x = [min(*seen, ridge) / 2, ridge, max(*seen, ridge) * 2]
            figure.add_scatter(x=x, y=[min(peak, i * device.bandwidth) for i in x], mode="lines",
                               name=f"roof, {label_of(dtype)}", hoverinfo="name", line={"width": 2, "dash": "dash"})
    figure.update_layout(xaxis={"type": "log", "title": "FLOPs for each byte"},
                         yaxis={"type": "log", "title": "FLOPs a second", "exponentformat": "SI"})
    return styled(figure, 420)


def readings_chart(name: str, series: Sequence[float | None]) -> Any:
    """One series of the driver's readings, thinned to a few hundred points."""
    every = max(len(series) // 500, 1)
    figure = go.Figure()
    figure.add_scatter(x=list(range(0, len(series), every)), y=list(series[::every]), mode="lines", name=label_of(name))
    figure.update_layout(xaxis={"title": "reading"}, yaxis={"title": label_of(name)}, showlegend=False)
    return styled(figure, 220)


def loss_chart(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """Training and held-out loss over the steps of a run, or of two, from their lines of metrics by their names."""
    figure = go.Figure()
    for (run, lines), dash in zip(runs.items(), ("solid", "dash"), strict=False):
        for name, called, colour, mode in (("loss", "training", PAIR[0], "lines"),
                                           ("eval_loss", "held-out", PAIR[1], "lines+markers")):
            found = [line for line in lines if line.get(name) is not None]
            figure.add_scatter(x=[line["step"] for line in found], y=[line[name] for line in found], mode=mode,
                               name=called if len(runs) == 1 else label_of(f"{called}, {run}"),
                               line={"color": colour, "dash": dash})
    figure.update_layout(xaxis={"title": "step"}, yaxis={"title": "loss, nats a label"})
    return styled(figure, 340)

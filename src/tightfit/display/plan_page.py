"""A plan as one HTML page that opens offline (plan.html.jinja): the answer, the candidates, their memory and speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import plotly.graph_objects as go
from markupsafe import Markup

from tightfit.devices import GIB
from tightfit.display.answers import answers
from tightfit.display.memory_bar import PARTS, host_memory_of_each, host_parts_of, parts_of
from tightfit.display.words import as_written, best_or_nearest, columns, fits, heading, marks, rank, throughput
from tightfit.page import UNPRINTABLE, label_of, render, styled
from tightfit.planning.costs import Memory
from tightfit.planning.plan import Candidate, Plan
from tightfit.recipe.yaml_text import to_yaml
from tightfit.text import percent, seconds, size

CHOSEN, FITTING, TOO_LARGE = "#d55e00", "#1fb58f", "#9a9a9a"
SYMBOLS = {CHOSEN: "diamond", FITTING: "circle", TOO_LARGE: "x"}


def plan_page(plan: Plan) -> str:
    choices, costs, copies = columns(plan)
    shown = [*choices, *costs, *copies]
    bars = [("memory", "Device memory at the peak", *_bars(plan, parts_of, plan.device.memory_bytes))]
    if copies:
        title, limit = host_memory_of_each(plan.device)
        title = f"{title[0].upper()}{title[1:]}, of {'an assumed ' * plan.device.host_assumed}{size(limit)}"
        bars.append(("host", title, *_bars(plan, host_parts_of, limit)))
    sections = {"answer": "Answer"}
    if plan.candidates:
        sections |= {"candidates": "Candidates", "frontier": "Memory against speed"}
        sections |= {name: title for name, title, *_ in bars}
    if plan.chosen is not None:
        sections["recipe"] = "The recipe"
    return render(
        __package__ or "", "plan.html.jinja", title=heading(plan), sections=sections,
        subtitle=as_written(plan.chosen.recipe) if plan.chosen else f"Nothing fits on {plan.device.name}",
        figures=_figures(plan), answers=answers(plan), marks=marks(plan), words=1 + len(choices),
        heads=["#", *(column.heading.replace("\n", " ") for column in shown)],
        rows=[[rank(plan, candidate), *(column.text(candidate) for column in shown)] for candidate in plan.candidates],
        frontier=_frontier(plan) if plan.candidates else None, bars=bars if plan.candidates else [],
        # in full: what is cut could not be copied
        yaml=Markup.escape(UNPRINTABLE.sub("?", to_yaml(plan.chosen.recipe.to_dict()))) if plan.chosen else "",
    )  # fmt: skip


def _figures(plan: Plan) -> list[dict[str, str]]:
    """The chosen candidate's figures, or the nearest's, in large print."""
    best = best_or_nearest(plan)
    if best is None:
        return []
    memory, time = best.estimate.memory, best.estimate.time
    found = [(time.unit, throughput(time), ""), ("step", seconds(time.step_seconds), ""),
             (_with_context(plan), size(memory.used), f"of {size(plan.device.memory_bytes)}"),
             ("fits", fits(best.estimate), "" if plan.chosen else "the nearest")]
    found += [("MFU", percent(time.mfu), "")] if time.mfu else []
    found += [("whole run", str(plan.whole_run), "")] if plan.whole_run else []
    return [{"name": name, "text": text, "remark": remark} for name, text, remark in found]


def _with_context(plan: Plan) -> str:
    return "memory with CUDA context" if plan.device.kind == "cuda" else "memory allocated"


def _frontier(plan: Plan) -> Any:
    """Speed against memory in use, a point each, and the line of what none that fits beats in both."""
    figure, unit = go.Figure(), plan.candidates[0].estimate.time.unit
    ordered = sorted((c for c in plan.candidates if c.estimate.fit_rank.fits),
                     key=lambda c: (c.estimate.memory.used, -c.estimate.time.throughput))
    line: list[Candidate] = []
    for candidate in ordered:
        if not line or candidate.estimate.time.throughput > line[-1].estimate.time.throughput:
            line.append(candidate)
    figure.add_scatter(x=[c.estimate.memory.used / GIB for c in line], y=[c.estimate.time.throughput for c in line],
                       mode="lines", line={"shape": "hv", "color": FITTING}, name="frontier", hoverinfo="skip")
    for candidate in plan.candidates:
        memory, time = candidate.estimate.memory, candidate.estimate.time
        colour = (CHOSEN if candidate == plan.chosen else FITTING if candidate.estimate.fit_rank.fits else TOO_LARGE)
        off, name = memory.context_uncertainty / GIB, f"#{rank(plan, candidate)}"
        figure.add_scatter(
            x=[memory.used / GIB], y=[time.throughput], name=f"{name}: {fits(candidate.estimate)}", mode="markers+text",
            text=[name], textposition="top center",
            hovertext=["<br>".join(map(label_of, as_written(candidate.recipe).split()))],
            hovertemplate="%{hovertext}<br>%{x:.1f} GiB, %{y:,.0f} " + unit + "<extra>%{fullData.name}</extra>",
            error_y={"array": [(time.error or 0.0) * time.throughput], "thickness": 1},
            error_x={"array": [off], "thickness": 1}, marker={"color": colour, "symbol": SYMBOLS[colour], "size": 11},
        )  # fmt: skip
    figure.add_vline(x=plan.device.memory_bytes / GIB, line_dash="dash", line_color=CHOSEN)
    figure.update_layout(xaxis={"title": f"{_with_context(plan)}, GiB", "rangemode": "tozero"},
                         yaxis={"title": unit, "rangemode": "tozero"})
    return styled(figure, 460)


def _bars(plan: Plan, held: Callable[[Memory], Mapping[str, int]], limit: int) -> tuple[Any, list[list[str]]]:
    """A memory of each candidate as a stacked bar, and the same as a table's headings and rows."""
    found = {f"#{rank(plan, candidate)}": held(candidate.estimate.memory) for candidate in plan.candidates}
    parts = [part for part in PARTS if any(part.key in each for each in found.values())]
    figure = go.Figure()
    for part in parts:
        counts = [each.get(part.key, 0) for each in found.values()]
        figure.add_bar(y=list(found), x=[count / GIB for count in counts], name=part.name, orientation="h",
                       marker_color=part.colour, hovertext=[size(count) for count in counts],
                       hovertemplate="%{hovertext}<extra>%{fullData.name}</extra>")
    if limit:
        figure.add_vline(x=limit / GIB, line_dash="dash", line_color=CHOSEN)
    figure.update_layout(barmode="stack", xaxis={"title": "GiB"}, yaxis={"autorange": "reversed", "type": "category"})
    cells = [[name, *(size(each[part.key]) if part.key in each else "-" for part in parts), size(sum(each.values()))]
             for name, each in found.items()]
    return styled(figure, 140 + 34 * len(found)), [["#", *(part.name for part in parts), "all"], *cells]

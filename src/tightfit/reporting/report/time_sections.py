"""The sections on time: by op class and by module, the longest ops, the roofline."""

from __future__ import annotations

from tightfit.reporting.report import figures
from tightfit.reporting.report.breakdown import (
    PASSES,
    busy_seconds,
    by_class,
    by_module,
    rows,
    shapes_text,
    whole,
)
from tightfit.reporting.report.markup import Html, paragraph, section, table
from tightfit.reporting.report.sections import View
from tightfit.reporting.report.wording import flops_text, percent, seconds_text
from tightfit.trace import Phase

MODULES, OPS, POINTS = 20, 30, 400
"""Modules and ops that are listed, and points of the roofline."""


def time_section(view: View) -> Html:
    """Time by op class and by module, forward against backward."""
    ops = view.shown
    busy, all_of_it = busy_seconds(ops), whole(view.profile, ops)
    if not busy:
        return section("time", "Time", paragraph("No op has a known time."))
    classes = [(kind.value, row) for kind, row in by_class(ops).items()]
    modules = by_module(ops)
    shown, left = modules[:MODULES], modules[MODULES:]
    if left:
        rest = {phase: sum(row[phase] for _, row in left) for phase in PASSES}
        shown = [*shown, (f"{len(left)} more modules", rest)]
    return section(
        "time", "Time by op class and module",
        paragraph(f"The {view.origin} ops take {seconds_text(busy)} of {seconds_text(all_of_it)}, or "
                  f"{percent(busy / all_of_it)}; the rest is data, and waiting for the host. Shares are of "
                  f"{seconds_text(all_of_it)}."),
        view.chart("class-chart", figures.pass_figure(classes, "time"), "Time by op class, stacked by pass"),
        _table("Time by op class", "class", classes, all_of_it),
        view.chart("module-chart", figures.pass_figure(shown, "time"), "Time by module, stacked by pass"),
        _table("Time by module, equal blocks together (*)", "module", shown, all_of_it),
    )  # fmt: skip


def _table(caption: str, heading: str, listed: list[tuple[str, dict[Phase, float]]], of: float) -> Html:
    used = [phase for phase in PASSES if any(row[phase] for _, row in listed)]
    return table(caption, (heading, *(phase.value for phase in used), "all", "share"), [
        (name, *(seconds_text(row[phase]) for phase in used), seconds_text(sum(row.values())),
         percent(sum(row.values()) / of)) for name, row in listed])


def ops_section(view: View) -> Html:
    """The ops that take longest, and what share of the roofline each reaches."""
    device, recipe = view.profile.device, view.profile.recipe
    found = rows(view.shown, device, recipe)
    of = whole(view.profile, view.shown)
    if not found or not of:
        return section("ops", "Ops and the roofline", paragraph("No op has a known time."))
    listed = [(row.name, shapes_text(row.shapes), row.dtype, row.op_class.value, f"{row.runs:,}",
               seconds_text(row.total), percent(row.total / of), flops_text(row.rate),
               "-" if row.achieved is None else percent(row.achieved)) for row in found[:OPS]]
    known = device.bandwidth and device.flops
    roof = "" if known else (f"The peak and the bandwidth of {device.name} are not known: points stand without a roof, "
                             "and no share of it is given.")
    few = f"The roofline shows the {POINTS:,} longest of {len(found):,}." if len(found) > POINTS else ""
    tf32 = bool(getattr(recipe.precision, "tf32", False))
    return section(
        "ops", "Ops and the roofline",
        paragraph("Ops of one name, shape and number format stand together. The roofline is what the device's peak or "
                  "its memory's bandwidth allow, whichever is less; an op that moves less memory than is counted, as "
                  "one whose data lies in cache, can lie above it.", roof, few),
        table(f"The {len(listed)} that take longest of {len(found):,}",
              ("op", "shapes", "dtype", "class", "runs", "time", "share", "rate", "of the roofline"), listed, left=4),
        view.chart("roofline-chart", figures.roofline_figure(found[:POINTS], device, tf32),
                   "Roofline: FLOPs a second against FLOPs for each byte; the table above holds the longest ops"),
    )  # fmt: skip

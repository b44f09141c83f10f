"""The report as one HTML page that opens offline: the figures that `report.html.jinja` shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tightfit import text
from tightfit.display.words import as_written, work
from tightfit.page import render
from tightfit.profiling.findings import Finding, findings
from tightfit.profiling.profile import Profile
from tightfit.profiling.report import charts
from tightfit.profiling.report.compare import (
    Pair,
    changed_values,
    compared,
    figures,
    headlines,
    name_and_module,
    pairs,
    phase_pairs,
    recipe_changes,
    records_by_figure,
    title,
    uncalibrated,
)
from tightfit.profiling.report.copies import Lanes, lanes_of, without_lanes
from tightfit.profiling.report.memory import MemoryCurve, curves
from tightfit.profiling.step import ByPhase, OpGroup, ProfiledStep, module_of, op_class, op_groups, seconds_by, steps_of
from tightfit.recipe import Recipe
from tightfit.recipe.yaml import to_yaml
from tightfit.trace import CATEGORY_NAMES, WALL_PHASES, Phase, Place
from tightfit.trace.file import sampling_notes
from tightfit.training.record import Record

SECTIONS = {"headline": "Headline", "difference": "Difference", "memory": "Memory", "copies": "Copies", "time": "Time",
            "ops": "Ops", "predicted": "Predicted", "readings": "Readings", "run": "Run", "about": "About"}  # fmt: skip
FINDINGS, MODULES, OPS, CHANGED_OPS, TENSORS, POINTS, LINES = 3, 20, 30, 20, 25, 400, 40
"""Findings, modules, ops and tensors that are listed, points of the roofline, and logged lines."""


@dataclass(frozen=True)
class View:
    """A profile's figures for the template."""

    profile: Profile

    @cached_property
    def steps(self) -> dict[str, ProfiledStep]:
        return steps_of(self.profile)

    @cached_property
    def shown(self) -> ProfiledStep | None:
        """The measured step, or the predicted one where nothing was measured; None without traces."""
        timed = [step for step in self.steps.values() if step.ops]
        return next(iter([*timed, *self.steps.values()]), None)

    @cached_property
    def curves(self) -> dict[str, MemoryCurve]:
        return curves(self.profile)

    @cached_property
    def host_curves(self) -> dict[str, MemoryCurve]:
        """Curves of the host's memory that is offloaded to."""
        return curves(self.profile, Place.HOST)

    @cached_property
    def lanes(self) -> dict[str, Lanes]:
        return lanes_of(self.profile)

    @property
    def host_memory(self) -> list[Pair]:
        """Bytes of the host's memory by category, measured and predicted; none where one of them is not there."""
        found = [step.by_category(Place.HOST) for step in self.steps.values()]
        return pairs(found[0], found[1], "all") if len(found) == 2 else []

    @cached_property
    def findings(self) -> list[Finding]:
        return findings(self.profile)

    @property
    def warnings(self) -> list[str]:
        """The share of the traces that sampling left out."""
        return [f"{name}: {note}" for name, step in self.steps.items() for note in sampling_notes(step.trace)]

    @property
    def wall(self) -> list[tuple[str, float, float | None]]:
        """Each phase with its seconds, and with the predicted ones."""
        profile = self.profile
        own = profile.predicted_seconds if profile.only_predicted else profile.phase_seconds
        return [(phase.value, own.get(phase, 0.0), profile.predicted_seconds.get(phase)) for phase in WALL_PHASES]

    @cached_property
    def classes(self) -> dict[str, ByPhase]:
        return seconds_by(self.shown.ops, op_class) if self.shown else {}

    @cached_property
    def modules(self) -> dict[str, ByPhase]:
        """The longest modules, equal blocks together, and the rest as one."""
        found = seconds_by(self.shown.ops, module_of) if self.shown else {}
        shown, rest = list(found.items())[:MODULES], list(found.values())[MODULES:]
        if rest:
            shown.append((f"{len(rest)} more modules", {phase: sum(row[phase] for row in rest) for phase in rest[0]}))
        return dict(shown)

    @cached_property
    def groups(self) -> list[OpGroup]:
        return op_groups(self.shown.ops, self.profile.device, self.profile.recipe.tf32) if self.shown else []

    def phases_of(self, rows: dict[str, ByPhase]) -> list[Phase]:
        """The phases that any of the rows has seconds in."""
        return [phase for phase in charts.PHASE_COLOURS if any(row[phase] for row in rows.values())]

    @property
    def aligned(self) -> bool:
        """Whether both steps are drawn over the same parts."""
        parts = [[part.begin for part in curve.parts] for curve in self.curves.values()]
        return len(parts) == 2 and parts[0] == parts[1]

    @property
    def peaks(self) -> list[tuple[str, str, str]]:
        """The step's peaks by whoever knows them, and the capacity."""
        profile = self.profile
        compiled = profile.measured is not None and profile.measured.laid_out
        rows = [("compiler's plan" if compiled else "allocator's statistics", profile.peak_bytes, "")]
        rows += [(f"{name} trace", curve.peak_bytes, f"at {text.seconds(curve.peak_seconds)}")
                 for name, curve in self.curves.items()]
        rows.append(("capacity", profile.capacity_bytes, ""))
        return [(name, text.size(count), where) for name, count, where in rows if count]

    def largest(self, name: str) -> list[tuple[str, ...]]:
        """The largest tensors alive at a step's peak."""
        tick, _ = self.steps[name].peak
        return [(text.shape(a.shape), a.dtype, CATEGORY_NAMES[a.holds(tick)], a.module, a.op, text.size(a.bytes))
                for a in self.steps[name].trace.alive(tick)[:TENSORS]]

    @property
    def readings(self) -> list[tuple[str, list[float]]]:
        """Each series that the driver reported anything in, its values in order of size."""
        known = {name: sorted(v for v in series if v is not None) for name, series in self.profile.readings.items()}
        return [(name, values) for name, values in known.items() if values]

    @property
    def notes(self) -> list[str]:
        traces = [f"{name} trace: {note}" for name, step in self.steps.items() for note in step.trace.notes]
        return list(dict.fromkeys([*self.profile.notes, *traces]))


def report(
    profile: Profile, other: Profile | None = None, run: Record | None = None,
    names: Sequence[str] = ("this run", "the other"),
) -> str:
    """The page. other: a second run, which this one is compared with. run: the whole run that the profile is of, where
    there is one. names: of the two runs, such as their folders."""
    view = View(profile)
    predicted = {}
    if len(view.steps) == 2:
        measured, guess = view.steps["measured"], view.steps["predicted"]
        predicted = compared(measured, guess, ("all", "all"))
        predicted["wall"] = pairs(measured.by_phase(), guess.by_phase(), "step")
    difference = None if other is None else _difference(view, View(other))
    absent = {"difference": difference is None, "readings": not view.readings, "run": run is None,
              "copies": not (view.lanes or view.host_curves)}
    return _page(
        profile.recipe, [name for name in SECTIONS if not absent.get(name)], view=view, profile=profile,
        title=title(profile), figures=list(figures(profile)), uncalibrated=uncalibrated(profile), difference=difference,
        names=list(names), predicted=predicted, without_lanes=without_lanes(profile), run=run,
        losses={} if run is None else {names[0]: run.lines},
        most={"findings": FINDINGS, "ops": OPS, "tensors": TENSORS, "points": POINTS},
    )  # fmt: skip


def report_of_runs(runs: Sequence[Record], names: Sequence[str], missing: str) -> str:
    """The page of a run that was not profiled, or of two, whose recipes are known. missing: what would profile it."""
    recipes = [run.recipe for run in runs if run.recipe is not None]
    difference = None if len(runs) == 1 else {
        "title": recipes[1].model, "headlines": records_by_figure(*runs),
        "changes": changed_values(*(recipe.to_dict() for recipe in recipes)),
        "wall": [], "memory": [], "classes": [], "origins": [],
    }  # fmt: skip
    return _page(recipes[0], ["difference", "run", "about"][difference is None:], view=None, title=recipes[0].model,
                 difference=difference, names=names, run=runs[0], missing=missing,
                 losses={name: run.lines for name, run in zip(names, runs, strict=True)})


def logged_rows(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, str, str]]:
    """Step, loss, held-out loss and peak memory of a few dozen of many lines of metrics, those of evaluations among
    them."""
    every = max(len(lines) // LINES, 1)
    kept = [line for number, line in enumerate(lines, 1) if not number % every or "eval_loss" in line]

    def shown(line: Mapping[str, Any], name: str, write: Callable[[float], str] = "{:.4f}".format) -> str:
        return "-" if line.get(name) is None else write(line[name])

    return [(line["step"], shown(line, "loss"), shown(line, "eval_loss"), shown(line, "peak_memory", text.size))
            for line in kept]


def _page(recipe: Recipe, sections: Sequence[str], **values: Any) -> str:
    return render(__package__ or "", "report.html.jinja", charts=charts, yaml=to_yaml(recipe.to_dict()),
                  logged_rows=logged_rows,
                  subtitle=f"{work(recipe)}: {as_written(recipe)}",
                  contents=[(name, SECTIONS[name]) for name in sections], **values)


def _difference(ours: View, theirs: View) -> dict[str, Any]:
    """The tables of two runs."""
    first, second = ours.shown, theirs.shown
    found: dict[str, Any] = {
        "title": title(theirs.profile), "headlines": list(headlines(ours.profile, theirs.profile)),
        "changes": recipe_changes(ours.profile, theirs.profile),
        "wall": phase_pairs(ours.profile, theirs.profile), "memory": [], "classes": [],
        "origins": [step.name for step in (first, second) if step is not None],
    }
    if first is not None and second is not None:
        changed = pairs(first.by(name_and_module), second.by(name_and_module))
        found |= compared(first, second)
        found["ops"] = sorted(changed, key=lambda pair: -abs(pair.difference))[:CHANGED_OPS]
    return found

"""The report as one HTML page that opens offline: the figures that `report.html.jinja` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tightfit import text
from tightfit.display.words import as_written, work
from tightfit.page import render
from tightfit.profiling.findings import findings
from tightfit.profiling.profile import Profile
from tightfit.profiling.report import charts
from tightfit.profiling.report.compare import (
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
from tightfit.profiling.report.copies import lanes_of, without_lanes
from tightfit.profiling.report.memory import MemoryCurve, curves
from tightfit.profiling.step import ByPhase, ProfiledStep, module_of, op_class, op_groups, seconds_by, steps_of
from tightfit.recipe import Recipe
from tightfit.recipe.yaml_text import to_yaml
from tightfit.trace import CATEGORY_NAMES, WALL_PHASES, Place
from tightfit.training.record import LOGGED, Record

SECTIONS = {"headline": "Headline", "difference": "Difference", "memory": "Memory", "copies": "Copies", "time": "Time",
            "ops": "Ops", "predicted": "Predicted", "readings": "Readings", "run": "Run", "about": "About"}  # fmt: skip
MAX_FINDINGS, MAX_MODULES, MAX_OPS, MAX_CHANGED_OPS, MAX_TENSORS, MAX_POINTS, MAX_LINES = 3, 20, 30, 20, 25, 400, 40
"""Findings, modules, ops and tensors that are listed, points of the roofline, and logged lines."""


def shown_step(steps: Mapping[str, ProfiledStep]) -> ProfiledStep | None:
    """The measured step, or the predicted one where nothing was measured; None without traces."""
    timed = [step for step in steps.values() if step.ops]
    return next(iter([*timed, *steps.values()]), None)


def _view(profile: Profile, steps: Mapping[str, ProfiledStep]) -> dict[str, Any]:
    """Figures of a profile and of its steps, by the names that the template has for them."""
    step, memory = shown_step(steps), curves(profile)
    ops = step.ops if step else []
    own = profile.predicted_seconds if profile.only_predicted else profile.phase_seconds
    parts = [[part.begin for part in curve.parts] for curve in memory.values()]
    in_host = [each.by_category(Place.HOST) for each in steps.values()]
    known = {name: sorted(v for v in series if v is not None) for name, series in profile.readings.items()}
    traces = [f"{name} trace: {note}" for name, each in steps.items() for note in each.trace.notes]
    return {
        "shown": step, "origins": list(steps), "findings": findings(profile),
        "wall": [(phase.value, own.get(phase, 0.0), profile.predicted_seconds.get(phase)) for phase in WALL_PHASES],
        "curves": memory, "aligned": len(parts) == 2 and parts[0] == parts[1], "peaks": _peaks(profile, memory),
        "largest": {name: _largest(steps[name]) for name in memory},
        "lanes": lanes_of(profile), "host_curves": curves(profile, Place.HOST),
        "host_memory": pairs(in_host[0], in_host[1], "all") if len(in_host) == 2 else [],
        "classes": seconds_by(ops, op_class), "modules": _longest(seconds_by(ops, module_of)),
        "groups": op_groups(ops, profile.device, profile.recipe.tf32),
        "readings": {name: values for name, values in known.items() if values},
        "notes": list(dict.fromkeys([*profile.notes, *traces])),
    }  # fmt: skip


def _peaks(profile: Profile, memory: Mapping[str, MemoryCurve]) -> list[tuple[str, str, str]]:
    """The step's peaks by whoever knows them, and the capacity."""
    compiled = profile.measured is not None and profile.measured.laid_out
    rows = [("compiler's plan" if compiled else "allocator's statistics", profile.peak_bytes, "")]
    rows += [(f"{name} trace", curve.peak_bytes, f"at {text.seconds(curve.peak_seconds)}")
             for name, curve in memory.items()]
    rows.append(("capacity", profile.capacity_bytes, ""))
    return [(name, text.size(count), where) for name, count, where in rows if count]


def _largest(step: ProfiledStep) -> list[tuple[str, ...]]:
    """The largest tensors alive at a step's peak."""
    tick, _ = step.peak
    return [(text.shape(a.shape), a.dtype, CATEGORY_NAMES[a.holds(tick)], a.module, a.op, text.size(a.bytes))
            for a in step.trace.alive(tick)[:MAX_TENSORS]]


def _longest(modules: Mapping[str, ByPhase]) -> dict[str, ByPhase]:
    """The longest modules, and the rest as one."""
    shown, rest = list(modules.items())[:MAX_MODULES], list(modules.values())[MAX_MODULES:]
    if rest:
        shown.append((f"{len(rest)} more modules", {phase: sum(row[phase] for row in rest) for phase in rest[0]}))
    return dict(shown)


def report(
    profile: Profile, other: Profile | None = None, run: Record | None = None,
    names: Sequence[str] = ("this run", "the other"),
) -> str:
    """The page. other: a second run, which this one is compared with. run: the whole run that the profile is of, where
    there is one. names: of the two runs, such as their folders."""
    steps = steps_of(profile)
    view, predicted = _view(profile, steps), {}
    if len(steps) == 2:
        measured, guess = steps["measured"], steps["predicted"]
        predicted = compared(measured, guess, ("all", "all"))
        predicted["wall"] = pairs(measured.by_phase(), guess.by_phase(), "step")
    difference = None if other is None else _difference(profile, other)
    absent = {"difference": difference is None, "readings": not view["readings"], "run": run is None,
              "copies": not (view["lanes"] or view["host_curves"])}
    return _page(
        profile.recipe, [name for name in SECTIONS if not absent.get(name)], view=view, profile=profile,
        title=title(profile), figures=list(figures(profile)), uncalibrated=uncalibrated(profile), difference=difference,
        names=list(names), predicted=predicted, without_lanes=without_lanes(profile), run=run,
        losses={} if run is None else {names[0]: run.lines},
        most={"findings": MAX_FINDINGS, "ops": MAX_OPS, "tensors": MAX_TENSORS, "points": MAX_POINTS},
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


def logged_rows(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The figures of LOGGED in a few dozen of many lines of metrics, those of evaluations among them."""
    every = max(len(lines) // MAX_LINES, 1)
    kept = [line for number, line in enumerate(lines, 1) if not number % every or "eval_loss" in line]
    return [[form(line[key]) if key in line else "-" for _, key, form in LOGGED] for line in kept]


def _page(recipe: Recipe, sections: Sequence[str], **values: Any) -> str:
    return render(__package__ or "", "report.html.jinja", charts=charts, yaml=to_yaml(recipe.to_dict()),
                  logged_rows=logged_rows, logged=[name for name, *_ in LOGGED],
                  subtitle=f"{work(recipe)}: {as_written(recipe)}",
                  sections={name: SECTIONS[name] for name in sections}, **values)


def _difference(ours: Profile, theirs: Profile) -> dict[str, Any]:
    """The tables of two runs."""
    first, second = (shown_step(steps_of(each)) for each in (ours, theirs))
    found: dict[str, Any] = {
        "title": title(theirs), "headlines": list(headlines(ours, theirs)), "changes": recipe_changes(ours, theirs),
        "wall": phase_pairs(ours, theirs), "memory": [], "classes": [],
        "origins": [step.name for step in (first, second) if step is not None],
    }
    if first is not None and second is not None:
        changed = pairs(first.by(name_and_module), second.by(name_and_module))
        found |= compared(first, second)
        found["ops"] = sorted(changed, key=lambda pair: -abs(pair.difference))[:MAX_CHANGED_OPS]
    return found

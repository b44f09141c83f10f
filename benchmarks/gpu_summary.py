"""What the rows of `plan_vs_gpu.py` come to: errors, misses, goals, and a figure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tightfit.recipe import CHOSEN_SLOTS

Row = Mapping[str, Any]
GOALS = (
    ("reserved memory, median error", "reserved", "median", 0.015),
    ("reserved memory, error at 95 %", "reserved", "p95", 0.04),
    ("step time uncalibrated, median error", "step time, uncalibrated", "median", 0.08),
    ("step time calibrated, median error", "step time, calibrated", "median", 0.04),
)
"""Name, which errors, which figure of them, and what it is to be at most."""
WORST = 12
"""Rows that are printed as the farthest off."""


def spread(errors: Iterable[float]) -> dict[str, float]:
    """Of relative errors: how many, the median, the one at 95 % (nearest rank) and the largest of their sizes, and
    their median with its sign. Only a count of 0 where there are none."""
    errors = list(errors)
    if not errors:
        return {"count": 0}
    sizes = sorted(map(abs, errors))
    return {
        "count": len(sizes), "median": statistics.median(sizes), "p95": sizes[math.ceil(0.95 * len(sizes)) - 1],
        "worst": sizes[-1], "bias": statistics.median(errors),
    }


def ran(row: Row) -> bool:
    return bool(row.get("measured")) and row["measured"]["outcome"] == "ran"


def reserved_error(row: Row) -> float | None:
    """Relative error of the peak of reserved bytes, where nothing kept the allocator from taking what it wanted."""
    if not ran(row) or row["predicted"]["fits"] != "yes":
        return None
    return _error(row["predicted"].get("peak_reserved"), row["measured"].get("peak_reserved"))


def errors_of(row: Row) -> dict[str, float]:
    """Every relative error of a row that can be told, by name."""
    if not ran(row):
        return {}
    predicted, measured = row["predicted"], row["measured"]
    found: dict[str, float | None] = {
        "reserved": reserved_error(row),
        "allocated": _error(predicted.get("peak_allocated"), measured.get("peak_allocated")),
        "context": _error(predicted.get("context"), measured.get("context")),
    }
    for part in ("phases", "categories"):
        for name, size in predicted.get(part, {}).items():
            found[f"{part}: {name}"] = _error(size, measured.get(part, {}).get(name))
    for name, seconds in predicted["step_seconds"].items():
        found[f"step time, {name}"] = _error(seconds, measured["step_seconds"])
    return {name: error for name, error in found.items() if error is not None}


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured else None


def summarize(rows: Iterable[Row], planned: int) -> dict[str, Any]:
    """planned: how many cases there are in all."""
    rows = list(rows)
    known = [row for row in rows if row.get("measured")]
    errors: dict[str, list[float]] = defaultdict(list)
    for row in known:
        for name, error in errors_of(row).items():
            errors[name].append(error)
    fits = {verdict: [row for row in known if row["predicted"]["fits"] == verdict]
            for verdict in ("yes", "with-retries", "no")}
    summary: dict[str, Any] = {
        "planned": planned, "measured": len(known),
        "refused": {row["name"]: row["refused"] for row in rows if row.get("refused")},
        "failed": {row["name"]: row["failure"] for row in rows if row.get("failure")},
        "errors": {name: spread(values) for name, values in sorted(errors.items())},
        "false_fits": [row["name"] for row in fits["yes"] + fits["with-retries"] if not ran(row)],
        "fitted_though_planned_not_to": [row["name"] for row in fits["no"] if ran(row)],
        "planned_not_to_fit": len(fits["no"]),
        "planned_with_retries": len(fits["with-retries"]),
        "retried_as_planned": sum(row["measured"].get("retries", 0) > 0 for row in fits["with-retries"]),
        "retried_unplanned": [row["name"] for row in fits["yes"] if row["measured"].get("retries", 0) > 0],
        **interval(known),
        "by_group": _by(known, lambda row: [row["group"]]),
        "by_choice": _by(known, lambda row: [f"{field}={_name(row['recipe'][field])}" for field in CHOSEN_SLOTS]),
    }
    return {**summary, "goals": goals(summary)}


def goals(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each goal with its figure; `met` is None where nothing tells."""
    found: list[dict[str, Any]] = []
    for name, errors, figure, at_most in GOALS:
        value = summary["errors"].get(errors, {}).get(figure)
        found.append({"goal": name, "at_most": at_most, "figure": value,
                      "met": None if value is None else value <= at_most})
    inside = summary["inside_interval"]
    found.append({"goal": "step times outside of the stated interval", "at_most": 0.1,
                  "figure": None if inside is None else 1 - inside, "met": None if inside is None else inside >= 0.9})
    misses = len(summary["false_fits"])
    judged = summary["measured"] > 0
    found.append({"goal": "false fits", "at_most": 0, "figure": misses if judged else None,
                  "met": misses == 0 if judged else None})
    return found


def interval(rows: Iterable[Row]) -> dict[str, float | None]:
    """The share of rows whose measured speed lies within the interval that was stated, of those where one was: of a
    calibrated prediction where there is one."""
    inside = []
    for row in filter(ran, rows):
        errors, seconds = row["predicted"].get("speed_error", {}), row["predicted"]["step_seconds"]
        which = "calibrated" if errors.get("calibrated") else "uncalibrated"
        if errors.get(which):
            inside.append(abs(seconds[which] / row["measured"]["step_seconds"] - 1) <= errors[which])
    return {"inside_interval": statistics.fmean(inside) if inside else None}


def _by(rows: Iterable[Row], names: Callable[[Row], Iterable[str]]) -> dict[str, Any]:
    """Errors of reserved memory and step time by what a row has."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        errors = errors_of(row)
        for name in names(row):
            for kind in ("reserved", "step time, uncalibrated", "step time, calibrated"):
                if kind in errors:
                    found[name][kind].append(errors[kind])
    return {name: {kind: spread(errors) for kind, errors in kinds.items()} for name, kinds in sorted(found.items())}


def _name(choice: Any) -> str:
    """A technique with its knobs, as a person reads it."""
    if not isinstance(choice, Mapping):
        return str(choice)
    return " ".join([str(choice["name"]), *(f"{knob}={value}" for knob, value in choice.items() if knob != "name")])


def lines(summary: Mapping[str, Any], rows: Iterable[Row]) -> list[str]:
    """The summary as it is printed."""
    text = [f"{summary['measured']} of {summary['planned']} cases measured, {len(summary['refused'])} cannot run here, "
            f"{len(summary['failed'])} failed"]
    for goal in summary["goals"]:
        text.append(f"{goal['goal']:40} {_figure(goal['figure']):>9}   goal: at most {_figure(goal['at_most'])}   "
                    f"{ {True: 'met', False: 'MISSED', None: 'not measured'}[goal['met']]}")
    text += [f"{name:40} median {_figure(e['median'])}, 95 % {_figure(e['p95'])}, worst {_figure(e['worst'])}, "
             f"bias {e['bias']:+.1%}, {e['count']} cases" for name, e in summary["errors"].items()]
    text += [f"false fit: {name}" for name in summary["false_fits"]]
    text += [f"ran though planned not to fit: {name}" for name in summary["fitted_though_planned_not_to"]]
    far = sorted(((abs(e), e, row["name"]) for row in rows if (e := reserved_error(row)) is not None), reverse=True)
    text += [f"reserved {error:+7.2%}  {name}" for _, error, name in far[:WORST]]
    text += [f"failed: {name}: {' '.join(reason.split())[-200:]}" for name, reason in summary["failed"].items()]
    return text


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2%}"


def plot(rows: Iterable[Row], path: Path, title: str) -> None:
    """Predicted against measured: reserved bytes, and seconds of a step."""
    from matplotlib.figure import Figure

    known = [row for row in rows if ran(row)]
    reserved = [(row["measured"]["peak_reserved"] / 2**30, row["predicted"]["peak_reserved"] / 2**30)
                for row in known if reserved_error(row) is not None]
    figure = Figure(figsize=(12, 5.6), layout="tight")
    axes = figure.subplots(1, 2)
    _panel(axes[0], {"": reserved}, "peak reserved memory, GiB", 0.08)
    times = {
        name: [(row["measured"]["step_seconds"], row["predicted"]["step_seconds"][name])
               for row in known if row["predicted"]["step_seconds"].get(name)]
        for name in ("uncalibrated", "calibrated")
    }
    _panel(axes[1], times, "seconds a step", 0.15)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _panel(axis: Any, points: Mapping[str, list[tuple[float, float]]], what: str, band: float) -> None:
    for (name, pairs), color in zip(points.items(), ("tab:blue", "tab:orange"), strict=False):
        if pairs:
            axis.scatter(*zip(*pairs, strict=True), s=14, alpha=0.7, label=name or None, color=color)
    sizes = [size for pairs in points.values() for pair in pairs for size in pair]
    if sizes:
        ends = [min(sizes) / 1.3, max(sizes) * 1.3]
        axis.plot(ends, ends, color="gray", linewidth=1)
        axis.fill_between(ends, [e * (1 - band) for e in ends], [e * (1 + band) for e in ends], alpha=0.15,
                          color="gray", label=f"within {band:.0%}")
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axis.legend()
    axis.set(title=what, xlabel="measured", ylabel="predicted")
    axis.grid(alpha=0.3)

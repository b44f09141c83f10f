"""Two profiles side by side: what another recipe, machine or version changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from tightfit.profiles import Profile
from tightfit.reporting.report import figures
from tightfit.reporting.report.breakdown import TimedOp, module_name
from tightfit.reporting.report.headline import is_ahead, own_peak, own_step, phases, throughput, title, utilization
from tightfit.reporting.report.markup import Html, paragraph, section, table
from tightfit.reporting.report.pairs import held_at_peak
from tightfit.reporting.report.sections import View
from tightfit.reporting.report.wording import percent, relative, seconds_text, signed_size, size
from tightfit.trace import Category

ROWS = 20
"""Ops whose time changed most that are listed."""
WORDS = ("this run", "the other")


def difference_section(view: View, other: View) -> Html:
    """What the other run has more or less of. Differences are the other less this one."""
    ours, theirs = view.profile, other.profile
    memory = _memory(view, other)
    classes = _seconds(view.shown, other.shown, lambda op: op.op.op_class.value)
    changed = sorted(_seconds(view.shown, other.shown, _op), key=lambda row: -abs(row[2] - row[1]))
    mixed = "" if view.origin == other.origin else (
        f"Of this run the ops are {view.origin}, of the other {other.origin}.")
    parts = [
        paragraph(f"This run: {title(ours)}. The other: {title(theirs)}. Differences are the other less this one.",
                  mixed),
        table("Headline", ("", *WORDS, "difference"), list(_headline(ours, theirs))),
        table("Fields of the recipe that differ", ("field", *WORDS), list(recipe_changes(ours, theirs)), left=3),
        table("Wall time by phase", ("phase", *WORDS, "difference", ""), _phases(ours, theirs)),
    ]  # fmt: skip
    if memory:
        names = [figures.NAMES[Category(name)] for name, _, _ in memory]
        parts += [
            view.chart("difference-memory", figures.pair_figure(names, [a for _, a, _ in memory],
                       [b for _, _, b in memory], WORDS, True), "Bytes by category at the peak, both runs"),
            table("Memory by category, each at its own peak", ("category", *WORDS, "difference", ""), [
                (name, size(a), size(b), signed_size(b - a), relative(a, b))
                for name, (_, a, b) in zip(names, memory, strict=True)]),
        ]  # fmt: skip
    if any(a or b for _, a, b in classes):
        parts += [
            view.chart("difference-classes", figures.pair_figure([n for n, _, _ in classes], [a for _, a, _ in classes],
                       [b for _, _, b in classes], WORDS, False), "Time by op class, both runs"),
            table("Time by op class", ("class", *WORDS, "difference", ""), [_times(*row) for row in classes]),
            table("Ops whose time changed most, by name and module", ("op", *WORDS, "difference", ""),
                  [_times(*row) for row in changed[:ROWS]]),
        ]  # fmt: skip
    return section("difference", "Difference to the other run", *parts)


def side_by_side(ours: Profile, theirs: Profile, names: tuple[str, str]) -> str:
    """Both headlines and phases in columns, and the difference. names: what the two runs are called."""
    rows = [("", *names, "difference"), ("", title(ours), title(theirs), ""), *_headline(ours, theirs)]
    rows += [(phase, a, b, share) for phase, a, b, _, share in _phases(ours, theirs)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def _phases(ours: Profile, theirs: Profile) -> list[tuple[str, str, str, str, str]]:
    pairs = zip(_own_phases(ours), _own_phases(theirs), strict=True)
    return [_times(phase, a, b) for (phase, a), (_, b) in pairs]


def _own_phases(profile: Profile) -> list[tuple[str, float]]:
    """Each phase's seconds: measured, or predicted where nothing was."""
    ahead = is_ahead(profile)
    return [(phase.value, (guess or 0.0) if ahead else seconds) for phase, seconds, guess in phases(profile)]


def _headline(ours: Profile, theirs: Profile) -> Iterator[tuple[str, str, str, str]]:
    first_step, second_step = own_step(ours), own_step(theirs)
    (a, unit), (b, other_unit) = throughput(ours, first_step), throughput(theirs, second_step)
    if unit == other_unit:
        yield unit, f"{a:,.0f}", f"{b:,.0f}", relative(a, b)
    yield "step", seconds_text(first_step), seconds_text(second_step), relative(first_step, second_step)
    first, second = utilization(ours, first_step)[0], utilization(theirs, second_step)[0]
    if first is not None and second is not None:
        yield "MFU", percent(first), percent(second), relative(first, second)
    first_peak, second_peak = own_peak(ours), own_peak(theirs)
    yield "peak memory", size(first_peak), size(second_peak), signed_size(second_peak - first_peak)
    if is_ahead(ours) or is_ahead(theirs):
        first_is, second_is = ("predicted" if is_ahead(each) else "measured" for each in (ours, theirs))
        yield "these are", first_is, second_is, ""


def recipe_changes(ours: Profile, theirs: Profile) -> Iterator[tuple[str, str, str]]:
    """Each field that the two recipes and devices differ in, by its dotted name."""
    yield from _differing("", ours.recipe.to_dict(), theirs.recipe.to_dict())
    if ours.device.name != theirs.device.name:
        yield "(device)", ours.device.name, theirs.device.name
    for name in sorted({*ours.versions, *theirs.versions}):
        a, b = ours.versions.get(name, "-"), theirs.versions.get(name, "-")
        if a != b:
            yield f"(version of {name})", a, b


def _differing(name: str, a: Any, b: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from _differing(f"{name}.{key}".lstrip("."), a.get(key), b.get(key))
    elif a != b:
        yield name, str(a), str(b)


def _memory(view: View, other: View) -> list[tuple[str, int, int]]:
    held = []
    for each in (view, other):
        name = next(iter(each.curves), None)
        if name is None:
            return []
        held.append(held_at_peak(getattr(each.profile, name), each.curves[name]))
    return [(name, a, held[1][name]) for name, a in held[0].items() if a or held[1][name]]


def _seconds(ours: Iterable[TimedOp], theirs: Iterable[TimedOp], key: Any) -> list[tuple[str, float, float]]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for at, ops in enumerate((ours, theirs)):
        for timed in ops:
            sums[key(timed)][at] += timed.in_all
    return [(name, a, b) for name, (a, b) in sums.items()]


def _op(timed: TimedOp) -> str:
    return f"{timed.op.name} in {module_name(timed.op.module)}"


def _times(name: str, a: float, b: float) -> tuple[str, str, str, str, str]:
    return name, seconds_text(a), seconds_text(b), seconds_text(b - a), relative(a, b)

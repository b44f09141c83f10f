"""The figures at the top of a report, and two steps side by side: measured and predicted, or those of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from textwrap import wrap
from typing import Any, NamedTuple

from tightfit import text
from tightfit.backends import load_backend
from tightfit.errors import TightfitError
from tightfit.models import resolve_source
from tightfit.planning.mfu import model_flops, model_flops_utilization, one_document
from tightfit.profiling.profile import Profile
from tightfit.profiling.step import ProfiledStep, module_of, op_class
from tightfit.recipe.resume import differences
from tightfit.tasks import TASKS
from tightfit.trace import WALL_PHASES, Op, Phase
from tightfit.training.record import Record

LINE_WIDTH = 28
"""Characters of a line of a figure, beside another run's."""
ORIGIN = "origin"
PEAK = "peak allocated"
"""The name of a peak of tensors' bytes, in plans, comparisons, reports and summaries alike."""
FAR_SLOWER = 2.0
"""From how many times a plain step's seconds on a followed one's are said beside them: its ops' own times, and the
waits between them, then tell less of a plain step."""


def title(profile: Profile) -> str:
    return f"{profile.recipe.model} on {profile.device.name}"


def full_rows(profile: Profile) -> int:
    """Tokens, or samples where there are no tokens, of a step whose rows are full, as a predicted one's are."""
    recipe = profile.recipe
    return recipe.batch_size * (recipe.seq_len if TASKS[recipe.task].reads == "tokens" else 1)


def throughput(profile: Profile, seconds: float) -> tuple[float, str]:
    """Tokens, or samples where there are no tokens, a second of the measured step, and which of the two. Where it is
    not known how many a step reads, its rows count as full."""
    work = profile.tokens or full_rows(profile)
    return (work / seconds if seconds > 0 else 0.0), TASKS[profile.recipe.task].unit


def utilization(profile: Profile, seconds: float) -> tuple[float | None, str]:
    """MFU of a step that takes so many seconds, and where its FLOPs come from. None where the device's peak or the
    FLOPs are not known."""
    if seconds <= 0:
        return None, ""
    flops, source = step_flops(profile)
    if not flops:
        return None, "no FLOPs known"
    share = model_flops_utilization(flops, profile.recipe, profile.device, seconds)
    return (share, source) if share else (None, "the device's peak is not known")


def step_flops(profile: Profile) -> tuple[int, str]:
    """Model FLOPs of a step's real tokens and where they come from: the shape of a model that is bundled or in a
    folder, or else the ops of the trace, recomputation left out. Nothing is downloaded, and no code of a model's is
    run. 0 where neither is there."""
    real = min((profile.tokens or full_rows(profile)) / full_rows(profile), 1.0)
    with suppress(TightfitError, ValueError, TypeError):
        recipe = profile.recipe
        if resolve_source(recipe).kind in ("bundled", "folder") and not recipe.trust_remote_code:
            size = load_backend(recipe.backend.name).model_size(one_document(recipe))
            if flops := model_flops(lambda _: size, recipe):
                return round(flops * real), ", ".join(filter(None, ["from the model's shape", size.parameters_text]))
    trace = profile.predicted or profile.measured
    if trace is None:
        return 0, ""
    passes = (Phase.FORWARD, Phase.BACKWARD)
    flops = sum(times * op.flops for op, times in trace.step_ops() if op.phase in passes)
    return (round(flops * real) if trace is profile.predicted else flops), f"from the ops of the {trace.origin} step"


def uncalibrated(profile: Profile) -> str:
    """The remark on predicted seconds that do not come from measurements of this machine."""
    return "" if profile.calibrated else ", not calibrated"


class Figure(NamedTuple):
    """A figure of the headline: its name, value, text, and a remark. value: None where it is not known."""

    name: str
    value: float | None
    text: str
    remark: str


def figures(profile: Profile) -> Iterator[Figure]:
    """The headline's figures."""
    guess, alone, step = profile.predicted_step_seconds, profile.only_predicted, profile.seconds
    rate, unit = throughput(profile, step)
    rows = _full_rows_text(profile)
    predicted = (f"{full_rows(profile) / guess:,.0f}{rows}" if guess else "",
                 f"{text.seconds(guess)}{rows}, {text.relative(step, guess)}")
    remarks = [f"predicted{uncalibrated(profile)}, not measured"] * 2 if alone else [
        f"predicted {figure}{uncalibrated(profile)}" if guess else "not predicted" for figure in predicted]
    yield Figure(unit, rate or None, f"{rate:,.0f}" if rate else "-", remarks[0])
    slower = f"; the followed step took {profile.overhead:.1f} times as long" if profile.overhead >= FAR_SLOWER else ""
    yield Figure("step", step or None, text.seconds(step or None), remarks[1] + slower)
    mfu, source = utilization(profile, step)
    yield Figure("MFU", mfu, "-" if mfu is None else text.percent(mfu), source)
    peak, room = profile.peak, profile.capacity_bytes
    share = f"{text.percent(peak / room)} of {text.size(room)}" if room else "capacity not known"
    yield Figure(PEAK, peak or None, text.size(peak) if peak else "-", (
        share if peak else "not measured") + ("; predicted, not measured" if alone else _predicted_peak(profile)))


def _predicted_peak(profile: Profile) -> str:
    if not profile.predicted_peak_bytes:
        return ""
    off = f", {text.relative(profile.peak_bytes, profile.predicted_peak_bytes)}" if profile.peak_bytes else ""
    return f"; predicted {text.size(profile.predicted_peak_bytes)}{_full_rows_text(profile)}{off}"


def _full_rows_text(profile: Profile) -> str:
    """The remark on predictions, whose rows are full, beside measured rows that padding fills; empty without."""
    return " of full rows" if 0 < profile.tokens < full_rows(profile) else ""


def headline(profile: Profile) -> str:
    """The figures in one line, and in another what was predicted of them."""
    known = [figure for figure in figures(profile) if figure.value is not None]
    shown = ", ".join(f"{figure.name} {figure.text}" for figure in known)
    guessed = "; ".join(f"{figure.name}: {figure.remark}" for figure in known if "predicted" in figure.remark)
    return "\n".join(filter(None, [": ".join(filter(None, [title(profile), shown])), guessed]))


@dataclass(frozen=True)
class Pair:
    """A figure of two steps: bytes, or seconds."""

    name: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        return self.second - self.first


def pairs(first: Mapping[str, float], second: Mapping[str, float], total: str = "") -> list[Pair]:
    """Figures of the same name, and their sum where `total` names it. Empty where either side has nothing."""
    if not any(first.values()) or not any(second.values()):
        return []
    found = [Pair(name, first.get(name, 0.0), second.get(name, 0.0)) for name in {**first, **second}]
    found = [pair for pair in found if pair.first or pair.second]
    return [*found, Pair(total, sum(first.values()), sum(second.values()))] if total else found


def name_and_module(op: Op) -> str:
    return f"{op.name} in {module_of(op)}"


def compared(first: ProfiledStep, second: ProfiledStep, totals: tuple[str, str] = ("", "")) -> dict[str, list[Pair]]:
    """Bytes by category, each at its own step's peak, and seconds of ops by class. totals: the names of their sums."""
    return {"memory": pairs(first.by_category(), second.by_category(), totals[0]),
            "classes": pairs(first.by(op_class), second.by(op_class), totals[1])}


def headlines(ours: Profile, theirs: Profile) -> Iterator[tuple[str, str, str, str]]:
    """The headline figures of two runs that both have: name, both, and how far the second lies from the first."""
    for a, b in zip(figures(ours), figures(theirs), strict=True):
        if a.name == b.name and a.value and b.value:
            yield a.name, a.text, b.text, text.relative(a.value, b.value)
    if ours.only_predicted or theirs.only_predicted:
        first, second = ("predicted" if each.only_predicted else "measured" for each in (ours, theirs))
        yield ORIGIN, first, second, ""


def phase_pairs(ours: Profile, theirs: Profile) -> list[Pair]:
    """Wall seconds by phase of two runs, each as measured, or as predicted where nothing was."""
    seconds = [each.predicted_seconds if each.only_predicted else each.phase_seconds for each in (ours, theirs)]
    return [Pair(phase.value, *(each.get(phase, 0.0) for each in seconds)) for phase in WALL_PHASES]


def side_by_side(ours: Profile, theirs: Profile, names: Sequence[str]) -> str:
    """Both headlines and phases in columns, and the difference, as text. names: of the two runs."""
    rows = [("", *names, "difference"), ("", title(ours), title(theirs), ""), *headlines(ours, theirs)]
    rows += [(pair.name, text.seconds(pair.first), text.seconds(pair.second), text.relative(pair.first, pair.second))
             for pair in phase_pairs(ours, theirs)]
    return in_columns(rows)


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of a name and values, as text in columns; below the first row, a long value has several lines."""
    lines = (zip_longest(*(wrap(cell, LINE_WIDTH) for cell in row), fillvalue="") for row in rows[1:])
    rows = [rows[0], *chain.from_iterable(lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def records_by_figure(ours: Record, theirs: Record) -> list[tuple[str, str, str]]:
    """The figures that either of two runs recorded: name, and both."""
    first, second = dict(ours.rows), dict(theirs.rows)
    return [(name, first.get(name, "-"), second.get(name, "-")) for name in {**first, **second}]


def recipe_changes(ours: Profile, theirs: Profile) -> list[tuple[str, ...]]:
    """Each field that two recipes and devices differ in, by its dotted name."""
    values = [{**each.recipe.to_dict(), "(device)": each.device.name,
               **{f"(version of {name})": version for name, version in each.versions.items()}}
              for each in (ours, theirs)]  # fmt: skip
    return changed_values(values[0], values[1])


def changed_values(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Each of two mappings' values that differ, by its dotted name, as texts."""
    return [(name, *("-" if value is None else str(value) for value in pair))
            for name, *pair in differences(ours, theirs)]

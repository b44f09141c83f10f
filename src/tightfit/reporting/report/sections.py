"""The report's sections, each from what was worked out of the profile once: see `View`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tightfit.profiles import Profile
from tightfit.recipe_text import to_yaml
from tightfit.reporting.report import figures
from tightfit.reporting.report.breakdown import TimedOp, timed_ops
from tightfit.reporting.report.findings import findings
from tightfit.reporting.report.headline import figures as headline_figures
from tightfit.reporting.report.headline import phases, uncalibrated
from tightfit.reporting.report.improvement import Improvement
from tightfit.reporting.report.markup import (
    Html,
    bullets,
    chart,
    code,
    folded,
    paragraph,
    prose,
    section,
    table,
    text,
    tiles,
)
from tightfit.reporting.report.memory import CATEGORIES, MemoryCurve, curves, highest_by_phase
from tightfit.reporting.report.pairs import Pair, category_pairs, class_pairs, phase_pairs
from tightfit.reporting.report.wording import percent, relative, seconds_text, signed_size, size
from tightfit.trace import Category, Trace

FINDINGS = 3
TENSORS = 25
"""Tensors that are listed at a peak."""


@dataclass
class View:
    """What a report's sections are drawn from.

    shown: the measured ops, or where none were measured, the predicted ones. charts: figures by the name that their
    place in the page has; sections add theirs.
    """

    profile: Profile
    curves: dict[str, MemoryCurve]
    measured: list[TimedOp]
    predicted: list[TimedOp]
    findings: list[Improvement]
    charts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: Profile) -> View:
        recipe, device = profile.recipe, profile.device
        return cls(profile, curves(profile), timed_ops(profile.measured, recipe, device),
                   timed_ops(profile.predicted, recipe, device), findings(profile))

    @property
    def shown(self) -> list[TimedOp]:
        return self.measured or self.predicted

    @property
    def origin(self) -> str:
        return "measured" if self.measured else "predicted"

    def chart(self, name: str, figure: Any, label: str) -> Html:
        """A place for a chart. label: what it shows, for those who cannot see it."""
        self.charts[name] = figure
        return chart(name, label)


def headline_section(view: View) -> Html:
    """The figures, the seconds by phase, and the findings that matter most."""
    profile = view.profile
    step = profile.step_seconds
    rows = [(phase.value, seconds_text(seconds if step else None), percent(seconds / step) if step else "-",
             Html(f'<span class="meter" style="width:{8 * seconds / step if step else 0:.2f}rem"></span>'),
             seconds_text(guess)) for phase, seconds, guess in phases(profile)]
    return section(
        "headline", "Headline", tiles(headline_figures(profile)), _findings(view),
        table("Time by phase (recomputation is part of the backward pass)",
              ("phase", "time", "share", "", f"predicted{uncalibrated(profile)}"), rows),
    )  # fmt: skip


def _findings(view: View) -> Html:
    if not view.findings:
        return paragraph("No finding: no wait for data, idle device, misaligned dimension, fp32 tensor or copying that "
                         "is worth a word.")
    items = []
    for each in view.findings[:FINDINGS]:
        derived = each.derived if each.change else each.derived[:1].upper() + each.derived[1:]
        write = f"Write {code(each.change)}: predicted gain {text(each.gain)} ({prose(derived)})" if each.change else \
            prose(derived)
        items.append(f"<li><strong>{prose(each.sentence)}</strong><br>{write}.</li>")
    rest = [f"{each.sentence}{f' ({each.change})' if each.change else ''}" for each in view.findings[FINDINGS:]]
    return Html(f"<h3>What matters most</h3><ol class=\"findings\">{''.join(items)}</ol>"
                + (folded(f"{len(rest)} more", bullets(rest)) if rest else ""))


def memory_section(view: View) -> Html:
    """Memory over the step, and what is alive at its peak."""
    profile = view.profile
    if not view.curves:
        return section("memory", "Memory", paragraph("No allocations were recorded."))
    aligned = len(view.curves) == 2 and (
        [s.begin for s in view.curves["measured"].stretches] == [s.begin for s in view.curves["predicted"].stretches])
    note = ("The predicted step is laid over the measured one phase by phase, so that what differs is memory, not time."
            if aligned else "The two steps have other parts, and each is drawn over its own seconds."
            if len(view.curves) == 2 else "")
    highest = {name: f"{name} peak {size(curve.peak_bytes)}" for name, curve in view.curves.items()}
    parts = [
        paragraph(note, "Backward passes are shaded."), _boxes(view),
        view.chart("memory-chart", figures.memory_figure(view.curves, profile.capacity_bytes),
                   f"Memory over one step by category: {'; '.join(highest.values())}. The tables below hold it."),
        _peaks(view), _highest(view),
    ]  # fmt: skip
    for name, curve in view.curves.items():
        trace = getattr(profile, name)
        listed = _largest(trace, curve, name)
        parts.append(listed if name == view.origin else folded(f"Largest tensors at the {name} peak", listed))
    return section("memory", "Memory over the step", *parts)


def _boxes(view: View) -> Html:
    """A box for each category and each of the two steps, which shows or hides its curves."""
    held = [category for category in CATEGORIES if any(curve.held[category].any() for curve in view.curves.values())]
    boxes = [f'<label><input type="checkbox" checked value="{category.value}"><span class="swatch" '
             f'style="background:{figures.category_colour(category)}"></span>{text(figures.NAMES[category])}</label>'
             for category in held]
    if len(view.curves) == 2:
        boxes += [f'<label><input type="checkbox" checked value="{name}">{word}</label>'
                  for name, word in (("measured", "measured (areas)"), ("predicted", "predicted (dashed)"))]
    return Html(f'<fieldset data-chart="memory-chart"><legend>Show</legend>{"".join(boxes)}</fieldset>')


def _peaks(view: View) -> Html:
    profile = view.profile
    rows = [(f"{name} trace", size(curve.peak_bytes), f"at {seconds_text(curve.peak_seconds)}")
            for name, curve in view.curves.items()]
    if profile.peak_bytes:
        planned = profile.measured is not None and profile.measured.laid_out
        rows.insert(0, ("what the compiler planned" if planned else "the allocator's own account",
                        size(profile.peak_bytes), ""))
    if profile.capacity_bytes:
        rows.append(("capacity", size(profile.capacity_bytes), ""))
    return table("Peaks of the step", ("peak", "bytes", "where"), rows)


def _highest(view: View) -> Html:
    found = {name: highest_by_phase(getattr(view.profile, name)) for name in view.curves}
    every = dict.fromkeys(phase for values in found.values() for phase in values)
    rows = []
    for phase in every:
        values = [values.get(phase, 0) for values in found.values()]
        rows.append((phase.value, *map(size, values), *([relative(*values)] if len(values) == 2 else [])))
    return table("The most memory in each phase", ("phase", *found, *(["residual"] if len(found) == 2 else [])), rows)


def _largest(trace: Trace, curve: MemoryCurve, name: str) -> Html:
    tick = curve.peak_tick
    rows = [("x".join(map(str, a.shape)) or "scalar", a.dtype, figures.NAMES[a.holds(tick)], a.module, a.op,
             size(a.bytes)) for a in trace.alive(tick)[:TENSORS]]
    return table(f"The {TENSORS} largest tensors alive at the {name} peak",
                 ("shape", "dtype", "category", "module", "made by", "bytes"), rows, left=5)


def prediction_section(view: View) -> Html:
    """Predicted against measured, with the residual."""
    profile = view.profile
    if profile.measured is None or profile.predicted is None:
        there = "predicted alone" if profile.predicted else "measured alone" if profile.measured else "without traces"
        return section("predicted", "Predicted against measured", paragraph(f"This profile is {there}."))
    memory, times = category_pairs(profile, view.curves), class_pairs(view.measured, view.predicted)
    wall = phase_pairs(profile)
    parts = [paragraph("Times are calibrated by this machine's own ceilings." if profile.calibrated else
                       "Times are not calibrated: run tightfit doctor --calibrate on this machine for better ones.")]
    if memory:
        names = [figures.NAMES.get(Category(p.name), p.name) if p.name != "all" else p.name for p in memory]
        parts += [view.chart("memory-pairs", _pair(names, memory, True), "Bytes by category, measured and predicted"),
                  _pairs("Memory by category, each at its own peak", names, memory, True)]
    for name, caption, pairs in (("phase-pairs", "Wall time by phase", wall),
                                 ("class-pairs", "Time of ops by class, waiting left out", times)):
        if pairs:
            names = [pair.name for pair in pairs]
            parts += [view.chart(name, _pair(names, pairs, False), f"{caption}, measured and predicted"),
                      _pairs(caption, names, pairs, False)]
    return section("predicted", "Predicted against measured", *parts)


def _pair(names: list[str], pairs: list[Pair], bytes_: bool) -> Any:
    return figures.pair_figure(names, [p.measured for p in pairs], [p.predicted for p in pairs],
                               ("measured", "predicted"), bytes_)


def _pairs(caption: str, names: list[str], pairs: list[Pair], bytes_: bool) -> Html:
    rows = []
    for name, pair in zip(names, pairs, strict=True):
        said = [size(int(v)) if bytes_ else seconds_text(v) for v in (pair.measured, pair.predicted)]
        off = signed_size(int(pair.residual)) if bytes_ else seconds_text(pair.residual)
        rows.append((name, *said, off, relative(pair.measured, pair.predicted)))
    return table(caption, ("", "measured", "predicted", "residual", "of measured"), rows)


def readings_section(view: View) -> Html:
    """What the driver said while steps ran."""
    rows, charts = [], []
    for at, (name, series) in enumerate(view.profile.readings.items()):
        known = sorted(value for value in series if value is not None)
        if known:
            figure = [f"{value:,.4g}" for value in (known[0], known[len(known) // 2], known[-1])]
            rows.append((name, *figure, f"{len(known):,}"))
            charts.append(view.chart(f"reading-{at}", figures.readings_figure(name, series), f"{name} over the steps"))
    if not rows:
        return Html("")
    return section("readings", "What the driver said", table(
        "While steps ran", ("reading", "least", "median", "most", "readings"), rows), folded("Charts", *charts))


def about_section(view: View) -> Html:
    """The recipe, the versions, and how sure it all is."""
    profile = view.profile
    traces = [trace for trace in (profile.measured, profile.predicted) if trace is not None]
    noted = [*profile.notes, *(f"{trace.origin} trace: {note}" for trace in traces for note in trace.notes)]
    figured = profile.predicted.unseen if profile.predicted else ()
    unseen = [(u.name, u.where, size(u.bytes), prose(u.source)) for u in figured]
    return section(
        "about", "About this profile",
        paragraph(f"The step that was traced took {profile.overhead:.2f} times as long as a plain one; the wall times "
                  "above are of plain steps, the ops' own times of the traced one.") if profile.measured else Html(""),
        bullets(dict.fromkeys(noted)),
        folded("Memory that no trace shows", table("Predicted beside the trace", ("what", "where", "bytes", "source"),
                                                   unseen, left=2)) if unseen else Html(""),
        table("Versions", ("library", "version"), sorted(profile.versions.items()), left=2),
        folded("The recipe, resolved", Html(f"<pre>{_long(to_yaml(profile.recipe.to_dict()))}</pre>")),
    )  # fmt: skip


def _long(shown: str) -> str:
    return "\n".join(str(text(line)) for line in shown.splitlines())

"""The report as one HTML page that opens offline."""

from __future__ import annotations

from pathlib import Path

from tightfit.files import replacing
from tightfit.profiles import Profile
from tightfit.recipe import CHOSEN_SLOTS
from tightfit.reporting.report.difference import difference_section
from tightfit.reporting.report.document import document
from tightfit.reporting.report.headline import title
from tightfit.reporting.report.markup import Html, text
from tightfit.reporting.report.sections import (
    View,
    about_section,
    headline_section,
    memory_section,
    prediction_section,
    readings_section,
)
from tightfit.reporting.report.time_sections import ops_section, time_section
from tightfit.trace.sample import sampling_notes

SECTIONS = {"headline": "Headline", "difference": "Difference", "memory": "Memory", "time": "Time", "ops": "Ops",
            "predicted": "Predicted", "readings": "Readings", "about": "About"}  # fmt: skip
"""The page's order, and what its contents call each section."""


def report(profile: Profile, other: Profile | None = None) -> str:
    """The page. other: a second run, which this one is compared with."""
    view = View.of(profile)
    parts = {
        "headline": headline_section(view),
        "difference": difference_section(view, View.of(other)) if other is not None else Html(""),
        "memory": memory_section(view),
        "time": time_section(view),
        "ops": ops_section(view),
        "predicted": prediction_section(view),
        "readings": readings_section(view),
        "about": about_section(view),
    }
    sampled = [f"{trace.origin}: {note}" for trace in (profile.measured, profile.predicted) if trace is not None
               for note in sampling_notes(trace)]
    warnings = "".join(f'<p role="note"><strong>{text(note)}. Sums below are of what was kept.</strong></p>'
                       for note in sampled)
    listed = {name: (SECTIONS[name], part) for name, part in parts.items()}
    return document(title(profile), _what(profile), listed, view.charts, warnings)


def write_report(path: Path, profile: Profile, other: Profile | None = None) -> None:
    """Write the page, whole or not at all. Raises OSError."""
    page = report(profile, other)
    with replacing(path) as temporary:
        temporary.write_text(page, "utf-8")


def _what(profile: Profile) -> str:
    recipe = profile.recipe
    choices = [f"{field}={getattr(getattr(recipe, field), 'name', getattr(recipe, field))}"
               for field in CHOSEN_SLOTS]
    return (f"global batch {recipe.batch_size:,}, micro-batch {recipe.micro_batch_size}, seq_len {recipe.seq_len:,}, "
            + ", ".join(choices))


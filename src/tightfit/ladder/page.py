"""A ladder as one HTML page that opens offline, in the style of the profile's report."""

from __future__ import annotations

from pathlib import Path

from tightfit.files import replacing
from tightfit.ladder.climbs import Climb
from tightfit.ladder.comparisons import told
from tightfit.ladder.lines import lines
from tightfit.ladder.sections import (
    View,
    about_section,
    compared,
    features_section,
    front_section,
    full_size_section,
    ladder_section,
    missing_section,
    peers_section,
)
from tightfit.reporting.report.document import document
from tightfit.reporting.report.markup import section

SECTIONS = {"ladder": "Ladder", "time": "Time", "memory": "Memory", "full": "Full size", "front": "Throughput",
            "features": "Features", "peers": "Peers", "missing": "Not run", "about": "About"}  # fmt: skip
"""The page's order, and what its contents call each section."""


def page(climb: Climb) -> str:
    """The page of what is known of a ladder so far."""
    view = View(climb, lines(climb))
    full = climb.asked.scale == "full"
    seconds, memory = told(view.shown, climb)
    parts = {
        "ladder": ladder_section(view),
        "time": section("time", "Time of a step", compared(view, "time", seconds, bytes_=False)),
        "memory": section("memory", "Memory", compared(view, "memory", memory, bytes_=True)),
        "full": full_size_section(view),
        "front": front_section(view),
        "features": features_section(view),
        "peers": peers_section(view),
        "missing": missing_section(view),
        "about": about_section(view),
    }
    beneath = f"{climb.asked.scale} shape on {climb.machine.device}" if not full else f"on {climb.machine.device}"
    return document(view.ladder.title, beneath, {name: (SECTIONS[name], part) for name, part in parts.items()},
                    view.charts)


def write_page(path: Path, climb: Climb) -> None:
    """Write the page, whole or not at all. Raises OSError."""
    made = page(climb)
    with replacing(path) as temporary:
        temporary.write_text(made, "utf-8")

"""Readings of machines that are not here; see readings/README.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tightfit.doctor.checks import checks
from tightfit.doctor.findings import Finding
from tightfit.doctor.readings import Readings, readings_from_json

FOLDER = Path(__file__).parent / "readings"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def recorded(name: str, /, **changes) -> Readings:
    """A recording; `changes` are to its first card's fields, or to `driver`, `host`, `software`, `disk` as dicts."""
    found = readings_from_json((FOLDER / f"{name}.json").read_text())
    for part in ("driver", "host", "software", "disk"):
        if part in changes:
            found = replace(found, **{part: replace(getattr(found, part), **changes.pop(part))})
    if changes:
        found = replace(found, gpus=(replace(found.gpus[0], **changes), *found.gpus[1:]))
    return found


def said(readings: Readings, field: str, severity: str | None = None) -> list[Finding]:
    """The findings on a field, of that severity if one is given."""
    return [f for f in checks(readings) if f.field == field and severity in (None, f.severity)]


def one(readings: Readings, field: str, severity: str | None = None) -> Finding:
    found = said(readings, field, severity)
    assert len(found) == 1, found
    return found[0]

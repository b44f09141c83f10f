"""Readings of machines that are not here; see readings/README.md."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from tightfit.doctor.checks import checks
from tightfit.doctor.findings import Finding
from tightfit.doctor.readings import Reading, Readings

T = TypeVar("T", bound=Reading)

FOLDER = Path(__file__).parent / "readings"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def recorded(name: str, /, **changes) -> Readings:
    """A recording; `changes` are to its first card's fields, or to `driver`, `host`, `software`, `disk` as dicts."""
    found = Readings.model_validate_json((FOLDER / f"{name}.json").read_text())
    for part in ("driver", "host", "software", "disk"):
        if part in changes:
            found = changed(found, **{part: changed(getattr(found, part), **changes.pop(part))})
    if changes:
        found = changed(found, gpus=(changed(found.gpus[0], **changes), *found.gpus[1:]))
    return found


def changed(reading: T, **changes) -> T:
    return reading.model_copy(update=changes)


def said(readings: Readings, field: str, severity: str | None = None) -> list[Finding]:
    """The findings on a field, of that severity if one is given."""
    return [f for f in checks(readings) if f.field == field and severity in (None, f.severity)]


def one(readings: Readings, field: str, severity: str | None = None) -> Finding:
    found = said(readings, field, severity)
    assert len(found) == 1, found
    return found[0]

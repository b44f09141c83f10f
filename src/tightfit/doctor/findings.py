"""The check-up's findings: one sentence for each thing looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["ok", "info", "advice", "problem"]
"""Severity: as it should be; worth knowing; costs speed or memory; stops training."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence on one reading.

    topic: what it is about, as a heading: `GPU 0`, `driver`.
    field: the reading's place in `Readings`, such as `gpus[0].temperature`; `value` is what was read there.
    action: what to do about it, as a sentence; empty where there is nothing to do.
    """

    topic: str
    severity: Severity
    sentence: str
    field: str
    value: Any = None
    action: str = ""


@dataclass(frozen=True)
class FindingBuilder:
    """Makes findings on one part of the readings. place: where that part lies in `Readings`, such as `gpus[0]`."""

    topic: str
    place: str
    part: Any

    def __call__(self, severity: Severity, field: str, sentence: str, action: str = "", value: Any = None) -> Finding:
        """field: of the part. value: where it is not the field's own, of several things by their number."""
        return Finding(topic=self.topic, severity=severity, sentence=sentence, field=f"{self.place}.{field}",
                       value=getattr(self.part, field) if value is None else value, action=action)

"""What the check-up says: one finding for each thing looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["ok", "info", "advice", "problem"]
"""As it should be; worth knowing; costs speed or memory; stops training."""


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

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON knows."""
        return asdict(self)

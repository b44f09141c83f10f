"""What could be better in a profile, with the change of the recipe that answers it."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.reporting.report.wording import percent, size

WORTH_SAYING = 0.01
"""Below it a finding is noise: plain steps differ by as much."""


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """What could be better. sentence: what is the case, with its figure. change: what to write in the recipe,
    `key=value`; empty where no field helps. seconds: predicted gain as a share of the step. bytes: predicted gain of
    peak memory. derived: how the gain was predicted, as a sentence. rank: what findings are sorted by."""

    sentence: str
    change: str
    derived: str
    seconds: float | None = None
    bytes: int | None = None
    rank: float

    @property
    def gain(self) -> str:
        """The predicted gain for reading."""
        if self.seconds is not None:
            return f"up to {percent(self.seconds)} of the step"
        return "not predicted" if self.bytes is None else f"up to {size(self.bytes)} at the peak"

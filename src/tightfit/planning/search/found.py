"""A combination of techniques that a search costed."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.planning.plan import Estimate
from tightfit.planning.search.candidates import Config


@dataclass(frozen=True)
class Found:
    """A combination at a micro-batch, and what it costs."""

    config: Config
    micro: int
    estimate: Estimate

    @property
    def speed(self) -> float:
        return self.estimate.time.samples_per_second

    @property
    def tier(self) -> int:
        """How well it fits: 0 with the margin to spare, 1 so after releasing cached memory, 2 without the margin, 3
        not at all."""
        memory = self.estimate.memory
        if self.estimate.safe:
            return 0 if memory.peak_reserved <= memory.capacity - memory.margin else 1
        return 2 if self.estimate.fits != "no" else 3

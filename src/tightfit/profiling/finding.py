"""A finding, and the evidence that findings are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from tightfit import text
from tightfit.profiling.profile import Profile
from tightfit.profiling.report.breakdown import Ops, busy_seconds, step_ops
from tightfit.profiling.report.memory import step_of
from tightfit.trace import Allocation, Category, Op, Trace


@dataclass(frozen=True, kw_only=True)
class Finding:
    """share: of the step, or of the memory at its peak, that it is about. sentence: what was found, with its figure.
    change: what to write in the recipe, `key=value`; empty where no field helps. seconds: predicted gain as a share of
    the step. bytes: predicted gain of peak memory. derived: how the gain was predicted, as a sentence. rank: what
    findings are sorted by."""

    share: float
    sentence: str
    derived: str
    change: str = ""
    seconds: float | None = None
    bytes: int | None = None
    rank: float = 0.0

    @property
    def gain(self) -> str:
        """The predicted gain for reading."""
        if self.seconds is not None:
            return f"up to {text.percent(self.seconds)} of the step"
        return "not predicted" if self.bytes is None else f"up to {text.size(self.bytes)} at the peak"


@dataclass(frozen=True)
class Evidence:
    """A profile's step as rules read it: the measured one, or the predicted one where nothing was measured."""

    profile: Profile
    trace: Trace

    @cached_property
    def ops(self) -> Ops:
        return step_ops(self.trace)

    @cached_property
    def step(self) -> float:
        """The seconds that shares are of: the step's, or its ops' own where they sum to more."""
        return max(self.profile.seconds, busy_seconds(self.ops))

    def share(self, chosen: Callable[[Op], bool]) -> float:
        """The share of the step that some ops take."""
        return busy_seconds(each for each in self.ops if chosen(each[0])) / self.step if self.step else 0.0

    @cached_property
    def peak(self) -> tuple[int, int]:
        """The tick at which the step's memory is highest, and the bytes."""
        step = step_of(self.trace)
        return self.trace.peak(step.start, step.stop)

    @cached_property
    def alive(self) -> list[Allocation]:
        """Activations and temporary memory at the peak, the largest first."""
        tick, _ = self.peak
        return [a for a in self.trace.alive(tick) if a.holds(tick) in (Category.ACTIVATIONS, Category.TEMPORARY)]

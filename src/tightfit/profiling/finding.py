"""A finding, and the rule that it comes from: what to look for in a step, the threshold, and the sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tightfit import text
from tightfit.profiling.profile import Profile
from tightfit.profiling.report.breakdown import Ops, busy_seconds, step_ops
from tightfit.profiling.report.memory import step_of
from tightfit.trace import Allocation, Category, Op, Trace
from tightfit.trace.sample import sampling_notes

WORTH_SAYING = 0.01
"""Plain steps differ by as much: below it a finding is noise."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """sentence: what was found, with its figure. change: what to write in the recipe, `key=value`; empty where no field
    helps. seconds: predicted gain as a share of the step. bytes: predicted gain of peak memory. derived: how the gain
    was predicted, as a sentence. rank: what findings are sorted by."""

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
            return f"up to {text.percent(self.seconds)} of the step"
        return "not predicted" if self.bytes is None else f"up to {text.size(self.bytes)} at the peak"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A change of the recipe, and its gain, as in `Finding`."""

    change: str = ""
    derived: str
    seconds: float | None = None
    bytes: int | None = None


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


Seen = tuple[float, dict[str, Any], Answer]
"""A share of the step or the peak, the words of the sentence, and the answer."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """sentence: a format of `share` and of the words that `look` gives. least: the threshold. compiled: whether it is
    for steps that a compiler laid out as a whole, or for others; None for both. sums: whether it needs every op."""

    look: Callable[[Evidence], Iterable[Seen]]
    sentence: str
    least: float = WORTH_SAYING
    compiled: bool | None = None
    sums: bool = False

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        trace, room = evidence.trace, evidence.profile.capacity_bytes or evidence.peak[1]
        if self.compiled not in (None, trace.laid_out) or (self.sums and sampling_notes(trace)):
            return  # of ops that were left out the sums say nothing
        for share, words, answer in self.look(evidence):
            if share < self.least:
                continue
            rank = share if answer.change else share / 2  # half: there is nothing to write
            if answer.seconds is not None:
                rank = answer.seconds
            elif answer.bytes is not None:
                rank = answer.bytes / room if room else 0.0
            yield Finding(sentence=self.sentence.format(share=text.percent(share), **words), change=answer.change,
                          derived=answer.derived, seconds=answer.seconds, bytes=answer.bytes, rank=rank)

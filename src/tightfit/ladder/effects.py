"""The guides' table of features, filled from what was measured: a factor where they say yes or no."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tightfit.ladder.lines import Line, times
from tightfit.ladder.published import FEATURES, Words
from tightfit.ladder.rows import OURS


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What one rung shows of a feature against its baseline.

    speed: samples a second, in those of the baseline. memory: the peak, in that of the baseline. None where either of
    the two did not run.
    """

    rung: str
    against: str
    speed: float | None
    memory: float | None


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A feature by the guides' words and by the rungs that show it; shown is empty where none of them does."""

    feature: str
    words: Words
    shown: tuple[Shown, ...]

    @property
    def speed(self) -> str:
        return span(each.speed for each in self.shown)

    @property
    def memory(self) -> str:
        return span(each.memory for each in self.shown)


def effects(shown: Sequence[Line]) -> list[Effect]:
    """Every feature of the guides in their order, each with the lines of ours that show it."""
    return [
        Effect(feature=feature, words=words, shown=tuple(
            Shown(rung=line.rung.name, against=line.rung.against, speed=line.speed, memory=line.memory)
            for line in shown
            if line.runner == OURS and line.rung.feature == feature and line.rung.against is not None
        ))
        for feature, words in FEATURES.items()
    ]  # fmt: skip


def span(factors: Iterable[float | None]) -> str:
    """Factors in words, such as `0.62x to 0.77x`; one alone where they agree, `not measured` where there is none."""
    known = [factor for factor in factors if factor is not None]
    if not known:
        return "not measured"
    least, most = times(min(known)), times(max(known))
    return least if least == most else f"{least} to {most}"

"""What is worked out of a ladder's lines: published, measured and predicted side by side, the front, peers' ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tightfit.devices import MIB
from tightfit.ladder.cards import card_name, published_card
from tightfit.ladder.climbs import Climb
from tightfit.ladder.lines import Line
from tightfit.ladder.rows import OURS, Measured, Predicted
from tightfit.ladder.rungs import Ladder, Rung

QUANTILES = {"least": 0.0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "most": 1.0}


@dataclass(frozen=True)
class Teller:
    """Who tells figures, and of which device; `card` is the same for every name of that device."""

    who: Literal["published", "measured", "predicted"]
    device: str
    card: str

    def __str__(self) -> str:
        return f"{self.who}, {self.device}"


Told = dict[Teller, list[float | None]]
"""A figure of every rung, by who tells it; None where that one tells nothing."""
Readers = dict[Teller, Callable[[Line], Measured | Predicted | None]]
"""Where a line has the row that someone tells figures by."""


def published_seconds(rung: Rung, ladder: Ladder) -> float | None:
    """Seconds of a step as published; None where none were."""
    if rung.published is None or rung.published.seconds is None:
        return None
    return rung.published.seconds / (ladder.steps_published or 1)


def published_bytes(rung: Rung) -> float | None:
    if rung.published is None or rung.published.memory_mib is None:
        return None
    return rung.published.memory_mib * MIB


def memory_of(row: Measured | Predicted | None, ladder: Ladder) -> float | None:
    """A row's bytes by the account that the published figures keep; None where there are none."""
    if row is None or (isinstance(row, Measured) and not row.seconds):
        return None
    return (row.driver_bytes if ladder.published_memory == "driver" else row.peak_allocated) or None


def seconds_of(row: Measured | Predicted | None) -> float | None:
    """A step's seconds, the median of those measured; None where there are none."""
    if row is None:
        return None
    return (row.median_seconds if isinstance(row, Measured) else row.step_seconds) or None


def own(shown: Iterable[Line]) -> list[Line]:
    """The lines of our own runs, one for each rung."""
    return [line for line in shown if line.runner == OURS]


def told(shown: Sequence[Line], climb: Climb) -> tuple[Told, Told]:
    """Seconds of a step and bytes of each rung at the scale that ran: as published, where that is of the same size,
    measured, and predicted for the device that measured."""
    device = climb.machine.device
    card = card_name(device)
    rows: Readers = {Teller("measured", device, card): lambda line: line.measured,
                  Teller("predicted", device, card): lambda line: line.predicted}
    return _told(own(shown), climb.asked.ladder, rows, climb.asked.scale == "full")


def told_at_full_size(shown: Sequence[Line], climb: Climb) -> tuple[Told, Told]:
    """Seconds of a step and bytes of each rung at full size: as published, and predicted for the card asked for."""
    gpu = climb.asked.gpu
    rows: Readers = {Teller("predicted", gpu, card_name(gpu)): lambda line: line.full} if gpu else {}
    return _told(own(shown), climb.asked.ladder, rows, True)


def _told(shown: list[Line], ladder: Ladder, rows: Readers, published: bool) -> tuple[Told, Told]:
    seconds, memory = Told(), Told()
    if published:
        who = Teller("published", ladder.published_on, published_card(ladder))
        seconds[who] = [published_seconds(line.rung, ladder) for line in shown]
        memory[who] = [published_bytes(line.rung) for line in shown]
    for who, row in rows.items():
        seconds[who] = [seconds_of(row(line)) for line in shown]
        memory[who] = [memory_of(row(line), ladder) for line in shown]
    return _known(seconds), _known(memory)


def _known(figures: Told) -> Told:
    return {who: values for who, values in figures.items() if any(value is not None for value in values)}


def numbers(shown: Iterable[Line]) -> dict[str, int]:
    """Each rung's number in its ladder, by its name."""
    return {line.rung.name: number for number, line in enumerate(own(shown), start=1)}


def place(line: Line, ladder: Ladder) -> tuple[float, float]:
    """Where a line stands: bytes, and samples a second; 0 of each where it did not run."""
    return memory_of(line.measured, ladder) or 0.0, line.measured.samples_per_second if line.measured else 0.0


def ran(shown: Iterable[Line]) -> list[Line]:
    """The lines that have figures."""
    return [line for line in shown if line.measured is not None and line.measured.seconds]


def front(shown: Iterable[Line], ladder: Ladder) -> list[Line]:
    """Those of our lines that none beats in samples a second without taking more memory, least memory first."""
    found: list[Line] = []
    for line in sorted(ran(own(shown)), key=lambda line: (place(line, ladder)[0], -place(line, ladder)[1])):
        if not found or place(line, ladder)[1] > place(found[-1], ladder)[1]:
            found.append(line)
    return found


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ours against a peer's on one rung. speed: our samples a second in theirs. memory: our peak in theirs. None where
    either did not run."""

    line: Line
    speed: float | None
    memory: float | None


def ratios(shown: Iterable[Line]) -> list[Ratio]:
    """One for each line of a peer, whether it is the same work or not: the line says which."""
    def inverse(factor: float | None) -> float | None:
        return 1 / factor if factor else None

    return [Ratio(line=line, speed=inverse(line.speed), memory=inverse(line.memory))
            for line in shown if line.runner != OURS]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The ratios to one peer over several rungs, as QUANTILES. what: speed, or memory. count: rungs that have one."""

    peer: str
    what: str
    count: int
    values: list[float]


def step_quartiles(line: Line) -> tuple[float, float] | None:
    """The quartiles of a line's speed in that of its baseline, over every two of their timed steps; None where either
    did not run."""
    ran, other = line.measured, line.baseline
    if ran is None or other is None or not ran.seconds or not other.seconds:
        return None
    _, low, _, high, _ = quantiles(
        [ran.samples * theirs / (other.samples * ours) for ours in ran.seconds for theirs in other.seconds])
    return low, high


def spread(found: Sequence[Ratio]) -> list[Spread]:
    """Of each peer, over the rungs that are the same work; none of a peer that has none."""
    same = [each for each in found if not each.line.same_work]
    made = []
    for peer in dict.fromkeys(each.line.runner for each in same):
        for what in ("speed", "memory"):
            ours = [getattr(each, what) for each in same if each.line.runner == peer]
            if known := [value for value in ours if value is not None]:
                made.append(Spread(peer=peer, what=what, count=len(known), values=quantiles(known)))
    return made


def quantiles(values: Iterable[float | None]) -> list[float]:
    """Those of QUANTILES, of what is known; empty where nothing is."""
    known = [value for value in values if value is not None]
    return [float(value) for value in np.quantile(known, list(QUANTILES.values()))] if known else []

"""A step's ops on their streams, simulated: the host issues them in order, and each stream runs its own in order.

The host runs up to `QUEUED` ops of a stream ahead of it. An op begins when it was issued, when its stream is free and
when the ops on other streams that it names have ended. The step advances with its main stream: on a GPU that is
COMPUTE, and the time that it waits for the host or for copies is part of the step; on a processor it is HOST.

Two steps are simulated in a row and the second is given, as a run in full swing has it. Of micro-batches that repeat,
three are simulated and the last one's time is taken for the rest, or the host's once it is no longer ahead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tightfit.trace import COPIES, Phase, Stream
from tightfit.trace.lanes import Stretch, joined

SIDE_STREAMS = (*COPIES, Stream.NETWORK)
"""The streams beside the main one."""
QUEUED = 1024
"""Kernels that CUDA lets the host run ahead: commonly observed, not documented."""


class Piece(NamedTuple):
    """An op of the simulation.

    host: seconds of the host to issue it. work: seconds on its stream. phase: of the step. waits: whether the host
    waits for its end. tick: its own, where others wait for it. after: ticks of the ops that it waits for.
    """

    host: float
    work: float
    phase: Phase
    waits: bool = False
    stream: Stream = Stream.COMPUTE
    tick: int | None = None
    after: tuple[int, ...] = ()


Segment = tuple[Sequence[Piece], int]
"""Pieces in order, and how often they run in a row."""


@dataclass
class Elapsed:
    """Seconds of a step, by the phases of its pieces; waiting counts to the piece that waits.

    for_host: what the main stream waited for the host. for_streams: what it waited for other streams, and what these
    take beyond the end of its own work.
    """

    by_phase: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    for_streams: float = 0.0
    for_host: float = 0.0

    @property
    def seconds(self) -> float:
        return math.fsum(self.by_phase.values())


@dataclass
class _Clocks:
    """Clocks of the host and of every stream, with the ends of ops still queued and of those that others name; a log of
    all that ran, where one is asked for."""

    main: Stream
    at: dict[Stream, float] = field(default_factory=lambda: dict.fromkeys(Stream, 0.0))
    queued: dict[Stream, deque[float]] = field(default_factory=lambda: {s: deque(maxlen=QUEUED) for s in Stream})
    ended: dict[int, float] = field(default_factory=dict)
    log: list[Stretch] | None = None

    def begin(self) -> None:
        """Begin a step. What is gathered are the weights that the one before leaves."""
        self.at[Stream.NETWORK] = max(self.at[Stream.NETWORK], self.at[self.main])

    def run(self, pieces: Sequence[Piece], weight: int, found: Elapsed) -> None:
        """Run the pieces, and count what they took `weight` times."""
        at, ended, main = self.at, self.ended, self.main
        host = at[Stream.HOST]
        for issue, work, phase, waits, stream, tick, after in pieces:
            ready = max([ended.get(other, 0.0) for other in after]) if after else 0.0
            if stream is Stream.HOST:
                waited, late = issue, max(ready - host, 0.0)
                host = end = host + late + issue + work
            else:
                queued = self.queued[stream]
                if len(queued) == QUEUED:
                    host = max(host, queued[0])
                host += issue
                start = at[stream]
                waited = max(host - start, 0.0)
                late = max(ready - (start + waited), 0.0)
                at[stream] = end = start + (waited + late + work)
                queued.append(end)
                if waits:
                    host = max(host, end)
            if tick is not None:
                ended[tick] = end
            if self.log is not None:
                self.log.append(Stretch(stream, phase, end - work, end))
            if stream is main:
                found.by_phase[phase] += weight * (waited + late + work)
                found.for_streams += weight * late
                found.for_host += weight * waited
        at[Stream.HOST] = host

    def fall_behind(self, pieces: Sequence[Piece], times: int, took: float, found: Elapsed) -> None:
        """Count what the main stream waits in so many more runs of pieces, each of which took it that long while the
        host was still ahead: until the copy of a large global batch ends, it issues much."""
        issuing = [piece.host + (piece.work if piece.stream is Stream.HOST else 0.0) for piece in pieces]
        once, now = math.fsum(issuing), self.at[self.main]
        lost = times * (once - took)
        if lost <= 0:
            return
        ahead = min(max(now - self.at[Stream.HOST], 0.0), once * QUEUED / len(pieces))
        self.at[Stream.HOST] = now - max(ahead - lost, 0.0)
        late = max(lost - ahead, 0.0)
        share = late / once
        for piece, issue in zip(pieces, issuing, strict=True):
            found.by_phase[piece.phase] += share * issue
        found.for_host += late


def lanes(segments: Sequence[Segment], main: Stream) -> tuple[Stretch, ...]:
    """Times at which each stream has work in the second of two steps, every segment as often as it runs."""
    clocks, log = _Clocks(main), list[Stretch]()
    for _ in range(2):
        begun, log = clocks.at[main], []
        clocks.log = log
        clocks.begin()
        for pieces, times in segments:
            for _ in range(times):
                clocks.run(pieces, 1, Elapsed())
    shown = (main, *SIDE_STREAMS)
    return joined(Stretch(s.stream, s.phase, s.begin - begun, s.end - begun) for s in log if s.stream in shown)


def simulate(segments: Sequence[Segment], main: Stream) -> Elapsed:
    """The second of two steps."""
    clocks = _Clocks(main)
    for _ in range(2):
        found = Elapsed()
        beyond = dict.fromkeys(SIDE_STREAMS, 0.0)
        clocks.begin()
        for pieces, times in segments:
            simulated = min(times, 3)
            for number in range(simulated):
                weight = times - simulated + 1 if number == simulated - 1 else 1
                before, spent = dict(clocks.at), found.seconds
                clocks.run(pieces, weight, found)
                if weight > 1:
                    clocks.fall_behind(pieces, weight - 1, clocks.at[main] - before[main], found)
                for stream in SIDE_STREAMS:
                    beyond[stream] += weight * (clocks.at[stream] - before[stream]) - (found.seconds - spent)
    stream, excess = max(beyond.items(), key=lambda pair: pair[1])
    if excess > 0:  # its work piles up from step to step: no step is shorter than that takes
        last = [piece.phase for pieces, _ in segments for piece in pieces if piece.stream is stream][-1]
        found.by_phase[last] += excess
        found.for_streams += excess
    return found


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Overlap of one step's copies, or communication, with its compute: how much longer they make it, which is its time
    less that of the same step in which they take none.

    seconds: of the transfers, one after the other. added: seconds that they make the step longer by. step_seconds: of
        the step, with them.
    """

    seconds: float
    added: float
    step_seconds: float

    @property
    def hidden(self) -> float:
        """Share of their seconds that the step is not made longer by."""
        return 1 - min(self.added / self.seconds, 1.0)

    @property
    def speed(self) -> float:
        """Share of the speed of the same step with transfers that take no time."""
        return 1 - self.added / self.step_seconds


def busy_seconds(segments: Sequence[Segment], stream: Stream) -> float:
    """Seconds of a stream's work in a step."""
    return sum(piece.work * times for pieces, times in segments for piece in pieces if piece.stream is stream)


def without(segments: Sequence[Segment], streams: Collection[Stream]) -> Elapsed:
    """A step in which the work of some streams takes no time."""
    free = [([piece._replace(work=0.0) if piece.stream in streams else piece for piece in pieces], times)
            for pieces, times in segments]
    return simulate(free, Stream.COMPUTE)

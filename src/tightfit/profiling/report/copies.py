"""Copies between host and device beside a step's compute: its lanes, how long each works, and what runs at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tightfit.profiling.profile import Profile
from tightfit.trace import COPIES, Stream
from tightfit.trace.lanes import Stretch

LANES = {Stream.COMPUTE: "compute", Stream.COPY_IN: "copies to the GPU", Stream.COPY_OUT: "copies back"}


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The lanes of a step, measured or predicted. busy: seconds that each works. copying: seconds in which something is
    copied, either way. hidden: share of these in which the device computes as well."""

    stretches: tuple[Stretch, ...]
    busy: dict[Stream, float]
    copying: float
    hidden: float


def lanes_of(profile: Profile) -> dict[str, Lanes]:
    """The lanes of a profile, as far as they are there, by `measured` and `predicted`."""
    return {name: _lanes(stretches) for name, stretches in profile.lanes.items() if stretches}


def _lanes(stretches: Sequence[Stretch]) -> Lanes:
    busy = {stream: _union(s for s in stretches if s.stream is stream) for stream in LANES}
    copying, computing = _union(s for s in stretches if s.stream in COPIES), busy[Stream.COMPUTE]
    either = _union(s for s in stretches if s.stream in LANES)
    hidden = (copying + computing - either) / copying if copying else 0.0
    return Lanes(stretches=tuple(stretches), busy=busy, copying=copying, hidden=hidden)


def _union(stretches: Iterable[Stretch]) -> float:
    """Seconds that any of the stretches covers."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((s.begin, s.end) for s in stretches):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total


def without_lanes(profile: Profile) -> str:
    """The reason why no lanes were measured; empty where they were."""
    if "measured" in profile.lanes:
        return ""
    if profile.measured is None:
        return f"Nothing was measured: what follows is predicted for {profile.device.name}."
    if profile.device.kind == "cpu":
        return "No lanes were measured: a processor, on which this step ran, copies nothing beside its compute."
    return "No lanes were measured: the profiler has no kernels of this step."

"""Seconds of each instruction of a compiled step, from JAX's own profile of it.

On a processor an instruction is an event on one of XLA's threads; on CUDA it is the kernels that it launched, on the
card's streams. Both carry the names of the instruction and of its program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax.profiler import ProfileData

HOST, CARD, STREAM = "/host:CPU", "/device:GPU:0", "Stream"
"""The profiler's names of the host's threads, of the first card, and of that card's streams."""
INSTRUCTION, PROGRAM, ORDINAL = "hlo_op", "hlo_module", "device_ordinal"
"""The names of an event's instruction, its program, and the number of its device."""
STARTED, ENDED = ("_pt", "_p"), ("_ct", "_c")
"""Numbers that an event and the end of what it handed to other threads have in common."""


@dataclass
class Events:
    """seconds: of all turns of each instruction, by name. others: of what ran on the card for no instruction."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    others: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def read_events(profile: bytes, program: str, platform: str) -> Events:
    """The events of a program in a profile, as JAX's profiler serializes one. platform: `cpu` or `gpu`."""
    read = ProfileData.from_serialized_xspace(profile)  # its planes end with it
    wanted = HOST if platform == "cpu" else CARD
    lines = [line for plane in read.planes if plane.name == wanted for line in plane.lines]
    return _on_threads(lines, program) if platform == "cpu" else _on_streams(lines, program)


def _on_threads(lines: list[Any], program: str) -> Events:
    found, started, ends = Events(), list[tuple[str, float, float, Any]](), dict[Any, float]()
    for event, said in _events(lines):
        stop = event.start_ns + event.duration_ns
        if said.get(PROGRAM) == program and INSTRUCTION in said and not said.get(ORDINAL):
            started.append((said[INSTRUCTION], event.start_ns, stop, tuple(map(said.get, STARTED))))
        elif ENDED[1] in said:
            ends[tuple(map(said.get, ENDED))] = stop
    for name, start, stop, number in started:
        found.seconds[name] += (max(stop, ends.get(number, stop)) - start) / 1e9
    return found


def _on_streams(lines: list[Any], program: str) -> Events:
    found = Events()
    for event, said in _events([line for line in lines if line.name.startswith(STREAM)]):
        ours = said.get(PROGRAM, program) == program and INSTRUCTION in said
        where = found.seconds if ours else found.others
        where[said[INSTRUCTION] if ours else event.name] += event.duration_ns / 1e9
    return found


def _events(lines: list[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    for line in lines:
        for event in line.events:
            yield event, dict(event.stats)

"""What JAX's profiler saw of one step: the seconds of each instruction of its program.

On a processor an instruction is an event of XLA's own on one of its threads; on CUDA it is the kernels that it
launched, on the card's streams. Both carry the names of the instruction and of its program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax.profiler import ProfileData

HOST, CARD, STREAM = "/host:CPU", "/device:GPU:0", "Stream"
"""How the profiler calls the threads of the machine, the first card, and what kernels run on."""
INSTRUCTION, PROGRAM, ORDINAL = "hlo_op", "hlo_module", "device_ordinal"
"""What an event says of itself: its instruction, its program, and the number of its device."""
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
    planes = list(read.planes)
    if platform == "cpu":
        return _on_threads([line for plane in planes if plane.name == HOST for line in plane.lines], program)
    return _on_streams([line for plane in planes if plane.name == CARD for line in plane.lines], program)


def _on_threads(lines: list[Any], program: str) -> Events:
    found, started = Events(), list[tuple[str, float, float, Any]]()
    ends: dict[Any, float] = {}
    for event, said in _events(lines):
        stop = event.start_ns + event.duration_ns
        if said.get(PROGRAM) == program and INSTRUCTION in said and not said.get(ORDINAL):
            started.append((said[INSTRUCTION], event.start_ns, stop, _numbers(said, STARTED)))
        elif (numbers := _numbers(said, ENDED)) is not None:
            ends[numbers] = stop
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


def _numbers(said: dict[str, Any], names: tuple[str, str]) -> tuple[Any, Any] | None:
    return (said.get(names[0]), said[names[1]]) if names[1] in said else None

"""Exchange between processes in a step: bytes, the links' time, and how much of it compute hides.

What it adds to a step is its time less that of the same step with an exchange that takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.devices import Device
from tightfit.planning.timing.network import ring_link
from tightfit.planning.timing.streams import Elapsed, Segment, simulate
from tightfit.trace import OpClass, Stream, Trace


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Exchange of one process with the others in a step.

    bytes: sent by each process, and received as well. seconds: that it takes, one collective after the other. added:
        seconds that it makes the step longer by. step_seconds: of the step, with it. link: what bounds it.
    """

    bytes: int
    seconds: float
    added: float
    step_seconds: float
    link: str

    @property
    def hidden(self) -> float:
        """Share of its seconds that the step is not made longer by."""
        return 1 - min(self.added / self.seconds, 1.0)

    @property
    def speed(self) -> float:
        """Share of the speed of the same step with an exchange that takes no time."""
        return 1 - self.added / self.step_seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"bytes": self.bytes, "seconds": self.seconds, "added_seconds": self.added, "hidden": self.hidden,
                "speed": self.speed, "link": self.link}


def exchange_of(trace: Trace, device: Device, blocks: Sequence[Segment], found: Elapsed) -> Exchange | None:
    """The exchange of a step on a GPU; None where it has none. blocks: of the step, as simulated; found: so."""
    sent = sum(op.bytes_read * times for op, times in trace.step_ops()
               if op.stream is Stream.NETWORK and op.op_class is OpClass.COMMUNICATION)
    if not sent:
        return None
    busy = sum(piece.work * times for pieces, times in blocks for piece in pieces if piece.stream is Stream.NETWORK)
    free = simulate([([p._replace(work=0.0) if p.stream is Stream.NETWORK else p for p in pieces], times)
                     for pieces, times in blocks], Stream.COMPUTE)
    return Exchange(bytes=sent, seconds=busy, added=max(found.seconds - free.seconds, 0.0),
                    step_seconds=found.seconds, link=ring_link(device).name)

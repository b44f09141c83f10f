"""Communication among processes in a step: bytes, time (of each collective, see `collectives`), the share hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.devices import Device
from tightfit.planning.timing.collectives import ring_link
from tightfit.planning.timing.streams import Elapsed, Overlap, Segment, busy_seconds, without
from tightfit.trace import OpClass, Stream, Trace


@dataclass(frozen=True, kw_only=True)
class Communication(Overlap):
    """Communication of one process with the others in a step.

    bytes: sent by each process, and received as well. link: what bounds it.
    """

    bytes: int
    link: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"bytes": self.bytes, "seconds": self.seconds, "added_seconds": self.added, "hidden": self.hidden,
                "speed": self.speed, "link": self.link}


def communication_of(
    trace: Trace, device: Device, segments: Sequence[Segment], found: Elapsed
) -> Communication | None:
    """The communication of a step on a GPU; None where it has none. segments: the step, simulated. found: its time."""
    sent = sum(op.bytes_read * times for op, times in trace.step_ops()
               if op.stream is Stream.NETWORK and op.op_class is OpClass.COMMUNICATION)
    if not sent:
        return None
    free = without(segments, (Stream.NETWORK,))
    return Communication(
        bytes=sent, seconds=busy_seconds(segments, Stream.NETWORK), added=max(found.seconds - free.seconds, 0.0),
        step_seconds=found.seconds, link=ring_link(device).name,
    )

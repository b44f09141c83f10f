"""Copies of a step between host and device: bytes, the links' time, and how much of it compute hides.

Weights, gradients and optimizer states are copied once for all micro-batches that go through the blocks together, so
that a larger global batch adds compute and nothing that the step waits for: what copies add stays about the same, and
from some number of samples on it no longer matters. `tests/planning/timing/test_copies.py` holds that to predictions of
other global batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.planning.timing.streams import Elapsed, Overlap, Segment, busy_seconds, without
from tightfit.recipe import Recipe
from tightfit.trace import COPIES, Phase, Stream, Trace

HIDDEN_SPEED = 0.97
"""Share of the speed without copies from which on they are said to be hidden."""
GROWING_PHASES = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)
"""Phases whose compute grows with a global batch."""


@dataclass(frozen=True, kw_only=True)
class Copies(Overlap):
    """Copies of one step.

    bytes_in, bytes_out: to the device and back. seconds_in, seconds_out: of the link in each direction, which go side
    by side.
    hidden_from: about how many samples a global batch needs for FREE of the speed without copies; None where they are
        hidden already, and where that cannot be told.
    """

    bytes_in: int
    bytes_out: int
    seconds_in: float
    seconds_out: float
    hidden_from: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"bytes_in": self.bytes_in, "bytes_out": self.bytes_out, "seconds_in": self.seconds_in,
                "seconds_out": self.seconds_out, "added_seconds": self.added, "hidden": self.hidden,
                "speed": self.speed, "hidden_from_samples": self.hidden_from}


def copies_of(
    trace: Trace, recipe: Recipe, alone: Sequence[Segment], segments: Sequence[Segment], found: Elapsed
) -> Copies | None:
    """The copies of a step on a GPU; None where it has none. alone: its segments without what copies and computing
    cost one another. segments: with it, as simulated. found: their seconds."""
    moved = {stream: sum(op.bytes_read * times for op, times in trace.step_ops() if op.stream is stream)
             for stream in COPIES}
    if not any(moved.values()):
        return None
    busy, free = {stream: busy_seconds(segments, stream) for stream in COPIES}, without(alone, COPIES)
    added = max(found.seconds - free.seconds, 0.0)
    hidden_from = None
    if added > (1 - HIDDEN_SPEED) * found.seconds and _stays_the_same(trace, recipe):
        growing = sum(free.by_phase[phase] for phase in GROWING_PHASES)
        needed = added * HIDDEN_SPEED / (1 - HIDDEN_SPEED) - (free.seconds - growing)
        hidden_from = math.ceil(recipe.batch_size * needed / growing)
    return Copies(
        bytes_in=moved[Stream.COPY_IN], bytes_out=moved[Stream.COPY_OUT], seconds_in=busy[Stream.COPY_IN],
        seconds_out=busy[Stream.COPY_OUT], seconds=sum(busy.values()), added=added, step_seconds=found.seconds,
        hidden_from=hidden_from,
    )  # fmt: skip


def _stays_the_same(trace: Trace, recipe: Recipe) -> bool:
    """Whether what the step waits for stays about the same with more micro-batches. Of a single one that cannot be
    told: the copies of its activations end with its compute, and not with the next one's."""
    assert recipe.accumulation != "auto"
    if recipe.batch_size == recipe.micro_batch_size:
        return False
    outside = all(op.phase is Phase.OPTIMIZER for op, _ in trace.step_ops() if op.stream in COPIES)
    return outside or recipe.accumulation.in_one_sweep

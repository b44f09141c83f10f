"""Shares of a streamed model's blocks that stay on the GPU: as much as there is room for."""

from __future__ import annotations

import math
from collections.abc import Collection

from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration
from tightfit.techniques.offload import Offload

OFFLOAD = "offload"
KINDS = ("weights", "gradients", "optimizer", "activations")
"""Kinds of memory that may stay on the device, first what saves most copies for its bytes."""


def evaluate_shares(exploration: Exploration) -> None:
    """Evaluate the choice with so much of its blocks on the device as that has room for, where its copies are waited
    for; where nothing fits, so what lacks host memory alone. Raises TraceBudgetExceeded."""
    best, at = exploration.best(), _field(exploration)
    if at is None:
        return
    asked = exploration.space.recipe.offload
    kinds = KINDS if asked == "auto" else asked.open_shares
    for choice, micro in [best] if best is not None else list(exploration.found):
        offload = with_shares(exploration.found[choice, micro], kinds)
        if offload is not None:
            changed = (*choice[:at], offload, *choice[at + 1 :])
            exploration.evaluate([(each, micro) for each in exploration.space.by_allocator(changed)])


def with_shares(found: Evaluated, kinds: Collection[str]) -> Offload | None:
    """The offloading of what was evaluated with so much of some kinds on the device as that has room for, weights
    first. None where host memory suffices and copies are not waited for, and where there is no room."""
    memory, time, offload = found.estimate.memory, found.estimate.time, found.recipe.offload
    waits = time.copies is not None and time.copies.speed < 1 - CLOCK_ERROR
    if offload == "auto" or memory.missing or not (memory.host_missing or waits):
        return None
    room, shares, lacking = memory.capacity - memory.margin - memory.peak_reserved, {}, memory.host_missing
    for kind in (kind for kind in KINDS if kind in kinds):
        held = memory.host_by_category.get(kind, 0)
        if held and room > 0:
            shares[kind] = math.ceil(100 * (1 - min(room / held, 1.0))) / 100
            moved = round((1 - shares[kind]) * held)
            room, lacking = room - moved, lacking - moved
    changed = offload.with_shares(shares)
    return None if lacking > 0 or changed == offload else changed


def _field(exploration: Exploration) -> int | None:
    """The position of offloading in a combination; None where no search decides it."""
    fields = exploration.space.fields
    return fields.index(OFFLOAD) if OFFLOAD in fields else None

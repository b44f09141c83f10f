"""Shares of blocks in host memory, by the room that a device has."""

from __future__ import annotations

import math
from collections.abc import Collection

from tightfit.planning.costs import Memory
from tightfit.techniques.offload import Offload

KINDS = ("weights", "gradients", "optimizer", "activations")
"""Kinds of memory that may stay on the device, first what saves most copies for its bytes."""
ALL_BLOCKS = 0.995
"""Share that is all of a model's blocks, with nothing outside of them."""


def fill_device(offload: Offload, memory: Memory, kinds: Collection[str] = KINDS) -> Offload | None:
    """The offloading with so much of some kinds on the device as that has room for beside its margin: first the states
    of embeddings and head, for whose copies nothing computes meanwhile and which leave host memory before any block's,
    then weights.

    memory: of a recipe with `offload`. None where the device has no room, and where what then stays in host memory is
    still too much for it.
    """
    if memory.missing:
        return None
    room, shares, lacking = memory.capacity - memory.margin - memory.peak_reserved, {}, memory.host_missing
    held_by, outside = dict(memory.host_by_category), memory.host_states_outside
    if outside and "optimizer" in kinds:
        kinds = [kind for kind in kinds if kind != "optimizer" or room >= outside]
        if room >= outside:
            shares["optimizer"] = ALL_BLOCKS
            held_by["optimizer"] -= outside
            room, lacking = room - outside, lacking - outside
    for kind in (kind for kind in KINDS if kind in kinds):
        held = held_by.get(kind, 0)
        if held and room > 0:
            shares[kind] = min(math.ceil(100 * (1 - min(room / held, 1.0))) / 100, shares.get(kind, 1.0))
            moved = round((1 - shares[kind]) * held)
            room, lacking = room - moved, lacking - moved
    changed = offload.with_shares(shares)
    return None if lacking > 0 or changed == offload else changed

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
ASSUMED_BLOCKS = 100
"""Number of blocks assumed where a trace shows none in host memory."""


def fill_device(offload: Offload, memory: Memory, kinds: Collection[str] = KINDS) -> Offload | None:
    """The offloading with as many blocks' tensors of some kinds on the device as that has room for beside its margin:
    first the states of embeddings and head, for whose copies nothing computes meanwhile and which leave host memory
    before any block's, then weights.

    memory: of a recipe with `offload`. None where the device has no room, and where what then stays in host memory is
    still too much for it.
    """
    if memory.missing:
        return None
    room, lacking = memory.capacity - memory.margin - memory.peak_reserved, memory.host_missing
    outside, shares = memory.host_states_outside, dict[str, float]()
    largest = max(getattr(offload.shares, kind) for kind in KINDS if kind != "activations")
    blocks = round(memory.host_blocks / largest) if memory.host_blocks else ASSUMED_BLOCKS
    if outside and "optimizer" in kinds:
        kinds = [kind for kind in kinds if kind != "optimizer" or room >= outside]
        if room >= outside:
            shares["optimizer"] = ALL_BLOCKS
            room, lacking = room - outside, lacking - outside
    for kind in (kind for kind in KINDS if kind in kinds):
        held = memory.host_by_category.get(kind, 0) - (outside if kind == "optimizer" else 0)
        if held <= 0 or room <= 0:
            continue
        there = max(round(getattr(offload.shares, kind) * blocks), 1)
        moved = math.floor(there * min(room / held, 1.0))
        if moved:
            shares[kind] = share_of(there - moved, blocks)
            room, lacking = room - held * moved / there, lacking - held * moved / there
    changed = offload.with_shares(shares)
    return None if lacking > 0 or changed == offload else changed


def share_of(count: int, blocks: int) -> float:
    """Share of the blocks that `count` of them are, in hundredths where these say as many."""
    short = round(count / blocks, 2)
    return short if round(short * blocks) == count else count / blocks

"""Recipes whose blocks wait in host memory: what is planned where nothing fits on the device alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tightfit.devices import Device
from tightfit.planning.plan import Candidate, Plan
from tightfit.planning.search.space import micro_batch_sizes
from tightfit.planning.timing.copies import FREE
from tightfit.recipe import Recipe

MOST = 16
"""Micro-batches that go through the blocks together, at most: each is traced."""
TRACES = 24
"""Traces of each search, at most: those of streamed steps take several times as long."""
STREAMED: dict[str, Any] = {
    "offload": {"name": "host", "activations": 1}, "accumulation": "by-block", "checkpointing": "every-block",
    "loss": "chunked", "compile": "off",
}
"""The fields that streaming decides, where they are open."""

FIELDS = ("offload", "accumulation", "update")
"""The fields that say that a recipe's step is streamed."""


def streamed(recipe: Recipe, device: Device) -> Iterator[Recipe]:
    """The recipe with its blocks in host memory, the largest micro-batch first, and with the embeddings as well at
    last; none where that cannot serve."""
    if recipe.mode != "train" or recipe.offload != "auto":
        return
    changes = {field: value for field, value in STREAMED.items() if getattr(recipe, field) == "auto"}
    asked = recipe.override(**changes)
    sizes = micro_batch_sizes(recipe.batch_size) if recipe.micro_batch_size == "auto" else [recipe.micro_batch_size]
    traced = [size for size in sizes if recipe.batch_size <= MOST * size]
    least = asked.override(offload={**STREAMED["offload"], "embeddings": True})
    for base, size in [*((asked, size) for size in reversed(traced)), *((least, size) for size in traced[:1])]:
        pinned = base.model_copy(update={"micro_batch_size": size})
        if not pinned.refusals(device):
            yield pinned


def with_shares(plan: Plan) -> Recipe | None:
    """The recipe of a plan's first candidate that fits with so much of its blocks on the device as that has room for.
    None where host memory suffices and copies are not waited for, and where no candidate has room."""
    return next((recipe for found in plan.candidates if (recipe := _with_shares(found)) is not None), None)


def _with_shares(found: Candidate) -> Recipe | None:
    """A candidate's recipe with weights on the device first, which save most copies for their bytes."""
    memory, time, offload = found.estimate.memory, found.estimate.time, found.recipe.offload
    waits = time.copies is not None and time.copies.speed < FREE
    if offload == "auto" or memory.missing or not (memory.host_missing or waits):
        return None
    room, shares, lacking = memory.capacity - memory.margin - memory.peak_reserved, {}, memory.host_missing
    for kind in ("weights", "gradients", "optimizer"):
        held = memory.host_by_category.get(kind, 0)
        if held and room > 0:
            shares[kind] = math.ceil(100 * (1 - min(room / held, 1.0))) / 100
            moved = round((1 - shares[kind]) * held)
            room, lacking = room - moved, lacking - moved
    if lacking > 0 or all(share == getattr(offload, kind) for kind, share in shares.items()):
        return None
    return found.recipe.override(offload={"name": offload.name, **vars(offload), **shares})


def faster(one: Plan, other: Plan) -> Plan:
    """The plan whose choice is faster, if it has one."""
    return max(one, other, key=lambda plan: plan.chosen.estimate.time.samples_per_second if plan.chosen else 0.0)

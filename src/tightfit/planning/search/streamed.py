"""Recipes whose blocks wait in host memory: what is planned where nothing fits on the device alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tightfit.devices import Device
from tightfit.planning.search.space import micro_batch_sizes
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
    """The recipe with its blocks in host memory, the largest micro-batch first; none where that cannot serve."""
    if recipe.mode != "train" or recipe.offload != "auto":
        return
    changes = {field: value for field, value in STREAMED.items() if getattr(recipe, field) == "auto"}
    asked = recipe.override(update="with-forward", **changes)
    sizes = micro_batch_sizes(recipe.batch_size) if recipe.micro_batch_size == "auto" else [recipe.micro_batch_size]
    for size in reversed([size for size in sizes if recipe.batch_size <= MOST * size]):
        pinned = asked.model_copy(update={"micro_batch_size": size})
        if not pinned.refusals(device):
            yield pinned

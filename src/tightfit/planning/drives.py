"""Bytes that DeepSpeed keeps on a drive and moves there in a step: weights in fp32, the copy of them that it updates,
the optimizer's states, and gradients once they are summed."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.recipe import Recipe
from tightfit.techniques.parallel import FP32, Parallel


@dataclass(frozen=True, kw_only=True)
class DriveBytes:
    """Bytes of a machine's processes. held: on the drive. in_memory: gradients while they are summed, in the host's
    memory. read, written: in a step, which gathers weights for each forward and each backward pass, writes gradients
    after the last one, and updates copy and states once."""

    held: int
    in_memory: int
    read: int
    written: int


def drive_bytes(recipe: Recipe, parallel: Parallel, parameters: int) -> DriveBytes:
    """Traffic of a resolved recipe with its drive. parameters: those that a machine's processes hold together."""
    states = 0.0 if recipe.optimizer == "auto" else recipe.optimizer.bytes_beside(None)
    micro = recipe.batch_size if recipe.micro_batch_size == "auto" else recipe.micro_batch_size
    passes = 2 * max(-(-recipe.batch_size // (micro * parallel.process_count)), 1)
    weights, updated = FP32 * parameters, round((2 * FP32 + states) * parameters)  # with gradients, as large as weights
    return DriveBytes(held=weights + updated, in_memory=weights, read=passes * weights + updated,
                      written=weights + updated)


def moves_of(recipe: Recipe, held: int) -> DriveBytes:
    """Traffic of a resolved recipe whose machines hold so many bytes on a drive."""
    of_one = drive_bytes(recipe, recipe.parallel, 1).held
    return drive_bytes(recipe, recipe.parallel, held // of_one)

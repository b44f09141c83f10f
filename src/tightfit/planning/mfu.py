"""Model FLOPs utilization (MFU) of a training step."""

from __future__ import annotations

from collections.abc import Callable

from tightfit.backends.measurements import ModelSize
from tightfit.devices import Device
from tightfit.errors import ModelError
from tightfit.models import resolve_source
from tightfit.recipe import Recipe
from tightfit.tasks import DOCUMENTS_A_ROW, get_task


def model_flops_utilization(flops: float, recipe: Recipe, device: Device, seconds: float) -> float:
    """Model FLOPs utilization (MFU): the share of the peak of all its devices that model FLOPs make in a step of a
    resolved recipe that takes so many seconds; 0 where the peak is not known."""
    precision = recipe.precision
    assert precision != "auto", "resolve the recipe first"
    peak = device.peak(precision.computes_in, precision.tf32) * recipe.parallel.process_count
    return flops / seconds / peak if seconds > 0 and peak else 0.0


def one_document(recipe: Recipe) -> Recipe:
    """The recipe with rows of one document, of the length that plans take it to have where several share a row."""
    if not recipe.data.shares_rows(get_task(recipe.task)):
        return recipe
    return recipe.model_copy(update={"seq_len": max(recipe.seq_len // DOCUMENTS_A_ROW, 1)})


def model_flops(model_size: Callable[[Recipe], ModelSize], recipe: Recipe) -> int:
    """Model FLOPs of a step, by the convention that `ModelSize` states, of each document that shares a row by itself;
    0 for a factory, which may stand for a module of the caller's own, and for a model that cannot be built. model_size:
    that of the recipe's model, for rows of `one_document`."""
    try:
        single = one_document(recipe)
        flops = 0 if resolve_source(recipe).kind == "factory" else model_size(single).flops
        return recipe.batch_size * flops * recipe.seq_len // single.seq_len
    except ModelError:
        return 0

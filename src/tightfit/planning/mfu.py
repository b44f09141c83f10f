"""Model FLOPs utilization (MFU) of a training step."""

from __future__ import annotations

from collections.abc import Callable

from tightfit.backends.measurements import ModelSize
from tightfit.devices import Device
from tightfit.errors import ModelError
from tightfit.models import resolve_source
from tightfit.recipe import Recipe


def model_flops_utilization(flops: float, recipe: Recipe, device: Device, seconds: float) -> float:
    """Model FLOPs utilization (MFU): the share of the peak of all its devices that model FLOPs make in a step of a
    resolved recipe that takes so many seconds; 0 where the peak is not known."""
    precision = recipe.precision
    assert precision != "auto", "resolve the recipe first"
    peak = device.peak(precision.computes_in, precision.tf32) * recipe.parallel.process_count
    return flops / seconds / peak if seconds > 0 and peak else 0.0


def model_flops(model_size: Callable[[Recipe], ModelSize], recipe: Recipe) -> int:
    """Model FLOPs of a step, by the convention that `ModelSize` states; 0 for a factory, which may stand for a module
    of the caller's own, and for a model that cannot be built."""
    try:
        return 0 if resolve_source(recipe).kind == "factory" else recipe.batch_size * model_size(recipe).flops
    except ModelError:
        return 0

"""The tools that planning is done with: a backend's predictions, the allocator's simulation, the time model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tightfit.backends.base import Backend
from tightfit.backends.measurements import ModelSize
from tightfit.calibration import Calibration
from tightfit.devices import Device
from tightfit.errors import ModelError
from tightfit.models import resolve_source
from tightfit.planning.allocator.replay import replay
from tightfit.planning.estimate import Tools
from tightfit.planning.timing.step_time import step_time
from tightfit.recipe import Recipe


def standard_tools(backend: Backend, calibration: Calibration | None = None, module: Any = None) -> Tools:
    """The tools. calibration: measured on this machine, where the device is its own. module: the caller's own, instead
    of what the recipe names."""
    sizes: dict[tuple[str, str, str, str, int], ModelSize] = {}

    def model_size(recipe: Recipe) -> ModelSize:
        if module is not None:
            raise ModelError("model: a module of your own is not what the recipe names")
        key = (recipe.model, repr(recipe.model_overrides), recipe.task, repr(recipe.trainable), recipe.seq_len)
        if key not in sizes:
            sizes[key] = backend.model_size(recipe)
        return sizes[key]

    def utilization(recipe: Recipe, device: Device, seconds: float) -> float:
        return model_flops_utilization(model_flops(model_size, recipe), recipe, device, seconds)

    predict = backend.predict if module is None else partial(backend.predict, model=module)
    return Tools(predict=predict, replay=replay,
                 step_time=partial(step_time, calibration=calibration), mfu=utilization, untraced=backend.untraced,
                 model_size=model_size)


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

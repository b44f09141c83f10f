"""The tools that planning is done with: a backend's predictions, the allocator's simulation, the time model."""

from __future__ import annotations

from functools import partial
from typing import Any

from tightfit.backends.base import Backend
from tightfit.backends.measurements import ModelSize
from tightfit.calibration import Calibration
from tightfit.devices import Device
from tightfit.errors import ModelError
from tightfit.planning.allocator.replay import replay
from tightfit.planning.estimate import Tools
from tightfit.planning.mfu import model_flops, model_flops_utilization
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

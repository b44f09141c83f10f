"""tightfit: fit a bigger transformer on one GPU, and train it faster.

    tightfit.plan(model, recipe, gpu="rtx-4090")
    tightfit.Trainer(model, recipe, dataset).train()
    tightfit.apply(model, recipe)
    tightfit.gpu_memory()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tightfit.backends.pytorch.gpu_memory import gpu_memory
    from tightfit.backends.pytorch.own_loop import Applied, apply
    from tightfit.display.plan_table import ReadablePlan
    from tightfit.planner import plan
    from tightfit.recipe import Recipe
    from tightfit.training.trainer import Trainer

__version__ = "0.1.0"

_HOMES = {
    "Applied": "tightfit.backends.pytorch.own_loop",
    "ReadablePlan": "tightfit.display.plan_table",
    "Recipe": "tightfit.recipe",
    "Trainer": "tightfit.training.trainer",
    "apply": "tightfit.backends.pytorch.own_loop",
    "gpu_memory": "tightfit.backends.pytorch.gpu_memory",
    "plan": "tightfit.planner",
}

__all__ = ["Applied", "ReadablePlan", "Recipe", "Trainer", "__version__", "apply", "gpu_memory", "plan"]


def __getattr__(name: str) -> Any:
    # Loaded when first used, so that `import tightfit` and `tightfit --help` stay quick.
    if name not in _HOMES:
        raise AttributeError(f"module 'tightfit' has no attribute {name!r}")
    from tightfit.backends import quiet_loading

    with quiet_loading():
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

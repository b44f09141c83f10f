"""The same rungs by other trainers: same model, weights, data, seed and number of steps, their own flags and loop."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from tightfit.backends.base import Timings
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.recipe import Recipe
from tightfit.tasks import get_task

Runner = Callable[[Recipe, Device, int, int], Timings]
"""A resolved recipe, its device, and how many steps to take before timing and timed. Raises Refused for what the
peer cannot do, MissingLibrary, OutOfMemory."""


def _runner(module: str) -> Runner:
    def run(recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
        found: Timings = import_module(f"{__name__}.{module}").run(recipe, device, warm_up, steps)
        return found

    return run


PEERS: dict[str, Runner] = {
    "plain": _runner("plain"),
    "hf-trainer": _runner("hf_trainer"),
    "lightning": _runner("lightning"),
    "liger": _runner("liger"),
}
"""Each peer by name; what it needs loads when it runs."""

TITLES = {"plain": "bare loop"}
"""What a peer is called where its name may be taken for a rung's."""

PACKED = "data.packing: no peer keeps documents apart that share a row; write data.packing=false"


def title_of(runner: str) -> str:
    """What a runner is called in tables and messages."""
    return TITLES.get(runner, runner)


def check_rows(recipe: Recipe) -> None:
    """Raise Refused where documents will share a row, which no peer can serve; no data is read for it."""
    if recipe.data.packing and recipe.data.source != "dummy" and get_task(recipe.task).packs:
        raise Refused(PACKED)

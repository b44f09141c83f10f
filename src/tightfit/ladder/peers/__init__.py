"""The same rungs by other trainers: same model, weights, data, seed and number of steps, their own flags and loop."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from tightfit.backends.measurements import Timings
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.recipe import Recipe
from tightfit.tasks import get_task


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another trainer.

    module: the one in this package whose function `run` is its loop, loaded when it runs. title: its name in tables.
    libraries: those that only its figures depend on, besides those of all runners.
    """

    module: str
    title: str
    libraries: tuple[str, ...] = ()

    def run(self, recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
        """Take a resolved recipe's steps: `warm_up` before timing, `steps` timed, and one whose memory is measured.

        Raises Refused for what the peer cannot do, MissingLibrary, OutOfMemory.
        """
        found: Timings = import_module(f"{__name__}.{self.module}").run(recipe, device, warm_up, steps)
        return found


PEERS = {
    "plain": Peer(module="plain", title="bare loop"),
    "hf-trainer": Peer(module="hf_trainer", title="hf-trainer", libraries=("accelerate", "bitsandbytes")),
}


def title_of(runner: str) -> str:
    """A runner's name in tables and messages."""
    return PEERS[runner].title if runner in PEERS else runner


def shares_rows(recipe: Recipe) -> bool:
    """Whether documents will share a row; no data is read for it."""
    return recipe.data.shares_rows(get_task(recipe.task))


def check_rows(recipe: Recipe) -> None:
    """Raise Refused where documents will share a row, which no peer can serve."""
    if shares_rows(recipe):
        raise Refused("data.packing: no peer keeps documents apart that share a row; write data.packing=false")

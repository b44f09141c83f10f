"""Recovery of a run that runs out of the device's memory: it goes on with a recipe that takes less."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

from tightfit.backends.world import OUT_OF_MEMORY, World
from tightfit.devices import Device
from tightfit.errors import OutOfMemory, Refused
from tightfit.planning.suggestions import savings, with_suggestions
from tightfit.recipe import Recipe
from tightfit.recipe.resume import ROUNDING
from tightfit.techniques.offload import STREAMED
from tightfit.text import size
from tightfit.training.run_folder import RunFolder
from tightfit.training.session import Session
from tightfit.training.state import OutOfMemoryInLoop, TrainerState
from tightfit.training.summary import Summary


def train_on(
    failed: OutOfMemory, train: Callable[[Session, TrainerState | None], Summary], session: Session, world: World,
    log: Callable[[str], None],
) -> Summary:  # fmt: skip
    """Train with what takes less memory, after an error, until that is enough.

    train: takes a session whose recipe is changed, and the state of the steps taken, where the last of them was saved.
    Raises OutOfMemory with what may help where the recipe wants no recovery, where nothing is left to change, outside
    of training's loop, and for a model of the caller's own whose weights are lost; in a world of several processes, the
    others of which wait for this one, too, for `start_anew` where that comes next.
    """
    while True:
        recipe = session.recipe
        found = less_memory(recipe, session.device) if recipe.recover else None
        if (found is None or not isinstance(failed, OutOfMemoryInLoop) or (world.size > 1 and not world.restarts)
                or (session.module is not None and failed.state is None)):
            raise with_suggestions(failed, recipe, session.device) from None
        if world.restarts:
            failed.args, failed.status = (f"{failed}{_expected(session)}",), OUT_OF_MEMORY
            raise failed
        state, steps = failed.state, failed.step
        text, why, recipe = found
        change = f"{text} ({why})"
        start = f"from step {steps}" if state or not steps else "from the newest checkpoint, or from the start"
        held = "; held then: " * bool(failed.held) + ", ".join(f"{n} {size(count)}" for n, count in failed.held.items())
        log(f"{failed}{held}{_expected(session)}. Going on {start} with {change}; recover=false ends the run instead")
        session = replace(session, recipe=recipe)
        failed.__traceback__ = failed.__context__ = None  # which hold the memory of the step that failed
        gc.collect()
        try:
            return train(session, state)
        except OutOfMemory as error:
            failed = error
        except Refused as refusal:
            raise OutOfMemory(f"{failed}, and {change} cannot serve: {refusal}") from None


def start_anew(folder: RunFolder, device: Device, log: Callable[[str], None]) -> list[str]:
    """Fields to set, as on the command line, with which the processes of a run in a folder are started anew after one
    ended with OUT_OF_MEMORY."""
    recipe = folder.saved_recipe()
    found = None if recipe is None else less_memory(recipe, device)
    assert found is not None
    text, why, _ = found
    log(f"Going on from the newest checkpoint, or from the start with {text} ({why}); recover=false ends the run "
        "instead")
    return [*text.split(), "resume=auto"]


def less_memory(recipe: Recipe, device: Device) -> tuple[str, str, Recipe] | None:
    """The first change that takes less memory and leaves results as they are up to rounding, as a person writes it,
    what it means, and the changed recipe: half the micro-batch, then attention and checkpointing that keep less, then
    blocks in host memory. None where there is none."""
    for saving in savings(recipe, device):
        if saving.field in ROUNDING:
            return saving.text, saving.why, recipe.override(**{saving.field: saving.value})
    streamed = recipe.override(**STREAMED)
    if device.kind == "cpu" or recipe.offloaded.uses_host or streamed.refusals(device):
        return None
    return " ".join(f"{name}={value}" for name, value in STREAMED.items()), "blocks in host memory", streamed


def _expected(session: Session) -> str:
    chosen = session.plan and session.plan.chosen
    return f"; the plan had expected a peak of {size(chosen.estimate.memory.used)}" if chosen else ""

"""Resolving what a run's recipe leaves open: by a plan where one can be trusted, else by the defaults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tightfit.devices import Device
from tightfit.errors import ModelError
from tightfit.planning.defaults import resolve
from tightfit.planning.plan import Plan
from tightfit.planning.search.search import search
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.targets import Target
from tightfit.recipe import Recipe
from tightfit.trace import Trace


def resolve_auto(
    recipe: Recipe, target: Target, predict: Callable[[Recipe, Device], Trace], log: Callable[[str], None]
) -> tuple[Recipe, Plan | None]:
    """The recipe with no `auto` left, and the plan it comes from; None where it was not planned.

    It is planned for a GPU, and for a processor whose speed was measured (`tightfit doctor --calibrate`): guessed, a
    processor's choice between formats may cost more than it gains. What compiles whole steps is planned for GPUs alone.
    Otherwise, and for a model that cannot be traced, the choices are the plain ones of `defaults`. log: takes a
    sentence for the person running this.

    Raises Refused where nothing fits.
    """
    device = target.device
    slowly = recipe.backend.compiles_whole_steps  # seconds for each trace, which is worth a line
    guessed = device.kind == "cpu" and (target.calibration is None or slowly)
    if guessed or not recipe.open_choices():
        return resolve(recipe, device), None
    try:
        plan = search(recipe, device, standard_tools(predict, target.calibration), for_run=True,
                      progress=partial(_say, log) if slowly else None)
    except ModelError as error:
        log(f"not planned: {error}")
        return resolve(recipe, device), None
    chosen = plan.recipe
    log(f"planned: {plan.answers.why}")
    return chosen, plan


def _say(log: Callable[[str], None], done: int, most: int, text: str) -> None:
    if done < most:
        log(f"planning: {done} of at most {most} compiled, now {text}")

"""Resolving what a run's recipe leaves open: by a plan where one can be trusted, else by the defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tightfit.backends.base import Backend
from tightfit.errors import ModelError
from tightfit.planning.defaults import resolve
from tightfit.planning.targets import Target
from tightfit.recipe import Recipe

if TYPE_CHECKING:
    from tightfit.planning.plan import Plan


def resolve_auto(
    recipe: Recipe, target: Target, backend: Backend, log: Callable[[str], None], module: Any = None
) -> tuple[Recipe, Plan | None]:
    """The recipe with no `auto` left, and the plan it comes from; None where it was not planned.

    It is planned for a GPU, and for a processor whose speed was measured (`tightfit doctor --calibrate`): guessed, a
    processor's choice between formats may cost more than it gains. What compiles whole steps is planned for GPUs alone,
    and weights that are divided among processes nowhere. Otherwise, and for a model that cannot be traced, the choices
    are the plain ones of `defaults`. log: takes a sentence for the person running this. module: the caller's own,
    instead of what `recipe.model` names.

    Raises Refused where nothing fits.
    """
    device = target.device
    slowly = recipe.backend.compiles_whole_steps  # seconds for each trace, which is worth a line
    guessed = target.is_guessed_processor or (slowly and device.kind == "cpu")
    if guessed or not recipe.open_choices() or recipe.parallel.shards:
        return resolve(recipe, device), None
    from tightfit.planning.search.search import search_with  # where something is planned

    def tell(done: int, total: int | None, text: str) -> None:
        if slowly and done != total:
            log(f"planning: {done} compiled, {text}")

    try:
        plan = search_with(backend, recipe, target, module=module, for_run=True, progress=tell)
    except ModelError as error:
        log(f"not planned: {error}")
        return resolve(recipe, device), None
    chosen = plan.recipe  # raises where nothing fits
    assert plan.chosen is not None
    log(f"planned: {plan.chosen.reasons[0]} {plan.answers.why}")
    return chosen, plan

"""Model FLOPs utilization (MFU) of a run's steps, where the card is in the catalogue."""

from __future__ import annotations

from collections.abc import Callable

from tightfit.devices import find_device
from tightfit.errors import RecipeError
from tightfit.tasks import get_task
from tightfit.training.session import Session


def utilization(session: Session) -> Callable[[float], float] | None:
    """The MFU at so many tokens a second (images: samples); None where the device's peak or the model's FLOPs are not
    known."""
    if session.device.kind != "cuda" or session.module is not None:
        return None
    from tightfit.planning.standard_tools import model_flops, model_flops_utilization  # where a peak is known

    recipe = session.recipe
    try:
        device = find_device(session.device.name)
    except RecipeError:  # not in the catalogue
        return None
    flops = model_flops(lambda wanted: session.backend.model_size(wanted, session.config), recipe)
    a_sample = 1 if get_task(recipe.task).reads == "images" else recipe.seq_len
    per_token = flops / recipe.batch_size / a_sample
    return (lambda rate: model_flops_utilization(per_token * rate, recipe, device, 1.0)) if flops else None

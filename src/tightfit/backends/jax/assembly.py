"""From a recipe to a build: the model's functions, then every technique in the fixed order of the slots."""

from __future__ import annotations

from functools import reduce
from typing import Any

from tightfit.backends.base import absences
from tightfit.backends.jax.apply import ABSENT, APPLY
from tightfit.backends.jax.build import Build
from tightfit.backends.jax.layers import layout
from tightfit.backends.jax.models import find_network
from tightfit.backends.jax.xla_flags import compiler_options
from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.models import model_facts, read_config
from tightfit.recipe import Recipe
from tightfit.tasks import get_task
from tightfit.techniques import SLOTS
from tightfit.techniques.backend import Jax


def assemble(
    recipe: Recipe, device: Device, devices: tuple[Any, ...], model: Any = None, config: Any = None
) -> Build:
    """The model with every technique of a resolved recipe applied. No array is made.

    device: what the techniques are chosen for. devices: JAX's, which the step runs on, or is compiled for.
    config: the model's configuration, where it was read before.
    Raises Refused with all reasons where a technique cannot serve, and ModelError for a model that is not here.
    """
    reasons = [*recipe.refusals(device), *absences(recipe, ABSENT), *_unserved(recipe)]
    if reasons:
        raise Refused("; ".join(reasons))
    if model is not None:
        raise ModelError(f"model: a {type(model).__name__} cannot run in backend: jax, which has models of its own; "
                         "name one, or write backend=pytorch")
    assert isinstance(recipe.backend, Jax)
    config = read_config(recipe) if config is None else config
    network, stored, notes = find_network(recipe, config)
    build = Build(
        recipe=recipe, device=device, devices=devices, task=get_task(recipe.task), facts=model_facts(recipe, config),
        network=network, stored=stored, notes=notes, stack=layout(recipe.backend),
        compiler_options=compiler_options(recipe.backend.xla_flags, devices),
    )
    techniques = [getattr(recipe, slot) for slot in SLOTS]
    return reduce(lambda sofar, technique: APPLY[type(technique)](technique, sofar), techniques, build)


def _unserved(recipe: Recipe) -> list[str]:
    """Fields besides the techniques that have no meaning here."""
    reasons = {
        "pad_vocab_to": "the vocabulary is not padded in backend: jax; write vocab_size as a multiple yourself",
        "empty_cache_steps": "JAX gives no cached memory back; leave it out",
    }
    return [f"{field}: {reason}" for field, reason in reasons.items() if getattr(recipe, field) is not None]

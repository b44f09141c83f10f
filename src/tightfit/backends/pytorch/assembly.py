"""From a recipe to a build: the model, then every technique in the fixed order of the slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import nn
from torch._subclasses import FakeTensor

from tightfit.backends.base import absences
from tightfit.backends.pytorch.apply import ABSENT, APPLY
from tightfit.backends.pytorch.blocks import find_stacks
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.models import build_model, cast_weights, ready_to_train
from tightfit.backends.pytorch.padding import pad_vocab
from tightfit.backends.pytorch.precision import weight_dtype
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.models import model_facts, module_facts
from tightfit.recipe import Recipe
from tightfit.tasks import get_task
from tightfit.techniques import SLOTS


def assemble(
    recipe: Recipe, device: Device, torch_device: torch.device, model: nn.Module | None = None,
    change: Callable[[Build], Build] | None = None,
) -> Build:
    """The model with every technique of a resolved recipe applied.

    device: what the techniques are chosen for. torch_device: where tensors are made: the device itself, or the CPU
        where the step is to run on fake tensors.
    model: a module of the caller's own, instead of what `recipe.model` names.
    change: what to do to the build before the techniques are applied.
    Raises Refused with all reasons where a technique cannot serve.
    """
    reasons = [*recipe.refusals(device), *absences(recipe, ABSENT)]
    if recipe.parallel != "none":
        reasons.append("parallel: more than one device is not in backend: pytorch yet; write parallel=none, or "
                       "backend=jax")
    if reasons:
        raise Refused("; ".join(reasons))
    build = bare_build(recipe, device, torch_device, model)
    return apply_techniques(build if change is None else change(build))


def bare_build(
    recipe: Recipe, device: Device, torch_device: torch.device, model: nn.Module | None = None
) -> Build:
    """The model on its device, with no technique applied yet but the format of its weights."""
    task, dtype = get_task(recipe.task), weight_dtype(recipe.precision)
    notes: tuple[str, ...] = ()
    if model is None:
        facts = model_facts(recipe)
        model, notes = build_model(recipe, task, torch_device, dtype)
    else:
        facts = module_facts(model, recipe)
        if dtype != torch.float32:
            cast_weights(model, dtype)  # before it moves, so that the device never holds it wider
        if not any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):  # those are there already
            model = model.to(torch_device)
        model = ready_to_train(model, recipe)
    if recipe.pad_vocab_to:
        pad_vocab(model, recipe.pad_vocab_to, facts.vocab_size)
    return Build(
        recipe=recipe, device=device, torch_device=torch_device, task=task, facts=facts,
        model=model, stacks=find_stacks(model), notes=notes,
    )


def apply_techniques(build: Build) -> Build:
    """Every technique of the recipe, applied in the fixed order of the slots."""
    # PyTorch has one way to lay out micro-batches, which `auto` can only mean.
    named = {slot: getattr(build.recipe, slot) for slot in SLOTS}
    techniques = [named[slot] for slot in SLOTS if slot != "accumulation" or named[slot] != "auto"]
    return reduce(lambda sofar, technique: APPLY[type(technique)](technique, sofar), techniques, build)

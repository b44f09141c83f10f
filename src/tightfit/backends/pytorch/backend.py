"""The PyTorch backend: the device, the build, the step."""

from __future__ import annotations

from functools import reduce

import psutil
import torch
from torch import nn

from tightfit.backends.pytorch.apply import APPLY
from tightfit.backends.pytorch.blocks import find_stacks
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.memory import memory_guard
from tightfit.backends.pytorch.models import build_model, cast_weights, ready_to_train
from tightfit.backends.pytorch.padding import pad_vocab
from tightfit.backends.pytorch.precision import weight_dtype
from tightfit.backends.pytorch.step import Step
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.models import model_facts, module_facts
from tightfit.recipe import Recipe
from tightfit.tasks import get_task
from tightfit.techniques import SLOTS


class PytorchBackend:
    """Trains with PyTorch. See `backends.base.Backend` for what each method promises."""

    def device(self, recipe: Recipe) -> Device:
        cuda = torch.cuda.is_available()
        if recipe.device == "cuda" and not cuda:
            raise Refused("device: 'cuda' was asked for, and torch finds no CUDA device; write device=cpu")
        if cuda and recipe.device != "cpu":
            properties = torch.cuda.get_device_properties(0)
            return Device(
                kind="cuda",
                name=properties.name,
                memory_bytes=properties.total_memory,
                capability=(properties.major, properties.minor),
            )
        return Device(kind="cpu", name="CPU", memory_bytes=psutil.virtual_memory().total)

    def build(self, recipe: Recipe, device: Device, model: nn.Module | None = None) -> Build:
        reasons = recipe.refusals(device)
        if reasons:
            raise Refused("; ".join(reasons))
        with memory_guard(lambda: "building the model"):
            return self._build(recipe, device, model)

    def _build(self, recipe: Recipe, device: Device, model: nn.Module | None) -> Build:
        task, torch_device = get_task(recipe.task), torch.device(device.kind)
        notes: tuple[str, ...] = ()
        dtype = weight_dtype(recipe.precision)
        if model is None:
            facts = model_facts(recipe)
            model, notes = build_model(recipe, task, torch_device, dtype)
        else:
            facts = module_facts(model, recipe)
            if dtype != torch.float32:
                cast_weights(model, dtype)  # before it moves, so that the device never holds it wider
            model = ready_to_train(model.to(torch_device), recipe)
        if recipe.pad_vocab_to:
            pad_vocab(model, recipe.pad_vocab_to, facts.vocab_size)
        build = Build(
            recipe=recipe, device=device, torch_device=torch_device, task=task, facts=facts,
            model=model, stacks=find_stacks(model), notes=notes,
        )
        return apply_techniques(build)

    def step(self, build: Build) -> Step:
        return Step(build)


def apply_techniques(build: Build) -> Build:
    """Every technique of the recipe, applied in the fixed order of the slots."""
    techniques = [getattr(build.recipe, slot) for slot in SLOTS]
    return reduce(lambda sofar, technique: APPLY[type(technique)](technique, sofar), techniques, build)

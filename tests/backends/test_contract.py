"""One contract over every rung of every technique, in each backend: it is declared, applied, builds, steps and learns,
or is refused."""

from __future__ import annotations

import math
from importlib import import_module
from importlib.util import find_spec

import pytest

from tightfit.data import prepare
from tightfit.data.loading import GlobalBatchLoader
from tightfit.errors import Refused
from tightfit.model_facts import model_facts
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.techniques import SLOTS
from tightfit.techniques.parallel import ManyProcesses

RUNGS = [(slot, rung) for slot, variants in SLOTS.items() for variant in variants
         for rung in variant.representative_settings()]
COMPILED = [pytest.param(slot, rung, marks=[pytest.mark.cold] * (getattr(rung, "backend", "") == "inductor"))
            for slot, rung in RUNGS]
"""Each rung, what Inductor compiles among those that take long."""
LOW_RANK = {"learning_rate": 2e-2, "model_overrides": {"initializer_range": 0.1}}
"""Frozen embeddings have to tell tokens apart."""
ADAPTED = {"trainable": "lora", "precision": "bf16", **LOW_RANK}
NEEDS = {
    "memory-budget": {"compile": {"name": "per-block", "backend": "aot_eager"}},
    "per-block": {"micro_batch_size": 4}, "whole": {"micro_batch_size": 4},  # one shape, compiled once
    "lion": {"learning_rate": 3e-3}, "sgd": {"learning_rate": 0.5}, "adafactor": {"learning_rate": 3e-2},
    "lora": LOW_RANK, "dora": LOW_RANK, "int8": ADAPTED, "nf4": ADAPTED, "base=bf16": ADAPTED,
    "base=fp16": {**ADAPTED, "precision": "fp16"},
}
"""What a technique wants of the rest of the recipe to learn this task."""
NAMES = {"PytorchBackend": "pytorch", "JaxBackend": "jax"}


@pytest.fixture
def name(backend):
    """What a recipe calls the backend."""
    return NAMES[type(backend).__name__]


def absent(name: str):
    return import_module(f"tightfit.backends.{name}.apply").ABSENT


def test_every_technique_is_applied_or_absent_with_a_reason(name):
    declared = {variant for variants in SLOTS.values() for variant in variants}
    applied = import_module(f"tightfit.backends.{name}.apply").APPLY
    assert set(applied) | set(absent(name)) == declared
    assert not set(applied) & set(absent(name))
    assert all("write " in reason for reason in absent(name).values())


def identifier(value) -> str:
    return value if isinstance(value, str) else str(value)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there is one core
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("slot", "rung"), COMPILED, ids=identifier)
def test_a_rung_builds_steps_and_learns(slot, rung, kind, tiny, backend, name):
    needs = {**NEEDS.get(rung.name, {}), **NEEDS.get(f"{slot}={rung.name}", {})}
    values = {**tiny, slot: rung, "device": kind, "batch_size": 8, "micro_batch_size": 3, "learning_rate": 1e-2,
              "data": {"source": "dummy", "samples": 9}, "backend": name, **needs,
              "model_overrides": {**tiny["model_overrides"], **needs.get("model_overrides", {})}}
    recipe = Recipe.from_dict(values)
    device = backend.device(recipe)
    if reasons := [*recipe.refusals(device), *backend.absences(recipe)]:
        assert all(len(reason) > 20 for reason in reasons)
        with pytest.raises(Refused, match=slot):
            backend.build(resolve(recipe, device), device)
        return
    recipe = resolve(recipe, device)
    if rung.name == "flash-attn" and find_spec("flash_attn") is None:
        with pytest.raises(Refused, match="pip install flash-attn"):
            backend.build(recipe, device)
        return
    if isinstance(rung, ManyProcesses):  # tests/backends/pytorch/techniques/test_processes.py starts some
        with pytest.raises(Refused, match="in processes of its own"):
            backend.build(recipe, device)
        return
    build = backend.build(recipe, device)
    data = prepare(recipe, model_facts(recipe))
    step = backend.step(build)
    with build.process_settings():
        (global_batch,) = step.global_batches(GlobalBatchLoader(data.train, recipe), 0, 1)
        losses = [step(global_batch, recipe.learning_rate).read().loss.mean for _ in range(12)]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] == pytest.approx(math.log(128), abs=0.4)
    assert losses[-1] < losses[0] - 0.25

"""What a run trains with: planned where a plan can be trusted, the plain defaults elsewhere, what is pinned always."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.failing import failing
from tests.plain import PLAIN
from tightfit import Recipe, Trainer
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.devices import Device, find_device
from tightfit.errors import ModelError
from tightfit.planning.defaults import resolve
from tightfit.planning.resolve_auto import resolve_auto
from tightfit.planning.targets import Target
from tightfit.recipe import CHOICES

CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 34, units=2)
RTX_4090 = Target(device=find_device("rtx-4090"))
PINNED = {**PLAIN, "loss": "auto", "micro_batch_size": 4}


def backend(predict):
    return SimpleNamespace(predict=predict, untraced=None, model_size=PytorchBackend().model_size)


@pytest.fixture
def told() -> list[str]:
    return []


def test_a_gpu_recipe_is_planned_and_keeps_its_pins(tiny, told):
    recipe = Recipe.from_dict({**tiny, **PINNED, "micro_batch_size": "auto", "precision": "auto"})
    settled, plan = resolve_auto(recipe, RTX_4090, PytorchBackend(), told.append)
    assert plan is not None
    assert settled == plan.recipe
    assert all(getattr(settled, field) != "auto" for field in CHOICES)
    assert settled.precision.name == "bf16"
    assert settled.checkpointing.name == "none"
    assert told == [f"planned: {plan.chosen.reasons[0]} {plan.answers.why}"]


@pytest.mark.parametrize(("fields", "held"), [
    ({"trainable": "lora"}, "bf16"), ({"trainable": "lora", "precision": "fp32"}, "as-is"),
    ({"trainable": "lora", "precision": "bf16-pure"}, "as-is"), ({"trainable": "lora", "base": "nf4"}, "nf4"),
    ({"trainable": {"name": "layers", "names": ["ln_f"]}}, "as-is"), ({}, "as-is"),
    ({"trainable": "lora", "mode": "inference"}, "as-is"), ({"trainable": "lora", "precision": "fp16"}, "fp16"),
])
def test_frozen_weights_are_in_the_16_bits_that_adapters_beside_them_compute_in(fields, held):
    assert resolve(Recipe.from_dict({"model": "gpt2", **fields}), RTX_4090.device).base.name == held


def test_frozen_weights_are_in_fp16_on_a_card_that_does_not_compute_in_bf16():
    settled = resolve(Recipe.from_dict({"model": "gpt2", "trainable": "lora"}), find_device("t4"))
    assert (settled.precision.name, settled.base.name) == ("fp16", "fp16")


def test_a_recipe_with_nothing_open_is_not_planned(tiny, told):
    recipe = Recipe.from_dict({**tiny, **PINNED, "loss": "plain"})
    settled, plan = resolve_auto(recipe, RTX_4090, backend(failing(AssertionError("nothing to plan"))), told.append)
    assert (plan, told) == (None, [])
    assert settled.micro_batch_size == 4


def test_a_processor_that_was_never_measured_takes_the_defaults(tiny, told):
    recipe = Recipe.from_dict({**tiny, "micro_batch_size": "auto"})
    settled, plan = resolve_auto(recipe, Target(device=CPU), PytorchBackend(), told.append)
    assert plan is None
    assert settled == resolve(recipe, CPU)


def test_what_compiles_whole_steps_takes_the_defaults_on_a_measured_processor_too(tiny, told):
    recipe = Recipe.from_dict({**tiny, "backend": "jax", "micro_batch_size": "auto"})
    measured, never = Target(device=CPU, calibration=object()), failing(AssertionError("compiled for a processor"))
    assert resolve_auto(recipe, measured, backend(never), told.append) == (resolve(recipe, CPU), None)


def test_what_compiles_whole_steps_tells_how_it_goes_on(tiny, told):
    recipe = Recipe.from_dict({**tiny, "backend": "jax", "checkpointing": "auto", "micro_batch_size": 4})
    predict = failing(ModelError("model: XLA cannot compile it"))
    assert resolve_auto(recipe, RTX_4090, backend(predict), told.append)[1] is None
    assert told[0].startswith("planning: 0 compiled, now micro_batch_size=4")
    assert told[-1].startswith("not planned: model: XLA cannot compile it; what can still be said")


def test_a_model_that_cannot_be_traced_takes_the_defaults_and_says_why(tiny, told):
    recipe = Recipe.from_dict({**tiny, "micro_batch_size": "auto"})
    predict = failing(ModelError("model: encoder.layer asks for nonzero"))
    settled, plan = resolve_auto(recipe, RTX_4090, backend(predict), told.append)
    assert plan is None
    assert settled == resolve(recipe, RTX_4090.device)
    assert "encoder.layer asks for nonzero" in told[0]


def test_a_run_keeps_its_plan_in_its_folder(tiny, tmp_path, monkeypatch):
    made = {}

    def planned(recipe, target, backend, log, module):
        settled, plan = resolve_auto(recipe, RTX_4090, backend, log, module)
        made["plan"] = plan
        return settled.override(precision="fp32"), plan

    monkeypatch.setattr("tightfit.training.session.resolve_auto", planned)
    monkeypatch.setattr(Target, "is_guessed_processor", False)
    Trainer(recipe={**tiny, **PINNED, "micro_batch_size": "auto", "output_dir": str(tmp_path / "run")}).train()
    written = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert written == json.loads(json.dumps(made["plan"].to_json()))

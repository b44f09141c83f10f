"""Techniques beside each other on two processes: a step learns what it learns on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.built import built, global_batches_of
from tests.training.processes import in_processes
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.sharding import full_tensor
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.world import joined
from tightfit.backends.world import launched_process
from tightfit.recipe import Recipe
from tightfit.techniques.parallel import Fsdp

LLAMA = {"model": "llama-3.2-1b", "model_overrides": {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16}}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "model": "moe-tiny", "router_aux_loss_coef": 0, "router_z_loss_coef": 0.1, "model_overrides": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32}}
"""The z-loss alone, which adds up over micro-batches that are others."""
BESIDE: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama": LLAMA,
    "experts": EXPERTS,
    "chunked": {"loss": {"name": "chunked", "tokens": 16}},
    "every-block": {"checkpointing": "every-block"},
    "every-nth": {"checkpointing": "every-nth"},
    "mlp": {"checkpointing": "mlp"},
    "tiled": {"checkpointing": {"name": "tiled-mlp", "tokens": 8}, **LLAMA},
    "selective": {"checkpointing": "selective"},
    "bf16": {"precision": "bf16"},
    "bf16 checkpointed": {"precision": "bf16", "checkpointing": "every-block", **LLAMA},
    "bf16-pure": {"precision": "bf16-pure"},
    "fp16": {"precision": "fp16"},
    "sgd": {"optimizer": "sgd", "learning_rate": 1e-1},
    "lion": {"optimizer": "lion"},
    "foreach": {"optimizer": {"name": "adamw", "implementation": "foreach"}},
    "anyprecision": {"optimizer": "adamw-anyprecision"},
    "unclipped": {"max_grad_norm": 0},
    "padded vocabulary": {"pad_vocab_to": 64, "vocab_size": 120, "loss": "chunked"},
}  # fmt: skip
AOT = {"name": "per-block", "backend": "aot_eager"}
COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {"compile": AOT},
    "compiled and checkpointed": {"compile": AOT, "checkpointing": "every-block"},
    "compiled tiles": {"compile": AOT, "checkpointing": {"name": "tiled-mlp", "tokens": 8}, **LLAMA},
    "compiled llama": {"compile": AOT, "precision": "bf16", "loss": "chunked", **LLAMA},
}  # fmt: skip
DDP_ALONE = {"segments": {"checkpointing": "segments"}, "adafactor": {"optimizer": "adafactor", "learning_rate": 1e-2},
             "8 bits": {"optimizer": "adamw-8bit"}, "muon": {"optimizer": "muon"},
             "muon of experts": {"optimizer": "muon", **EXPERTS},
             "nf4": {"trainable": "lora", "base": "nf4", "checkpointing": "every-block"}}  # fmt: skip
HALF = {"bf16", "bf16 checkpointed", "compiled llama", "bf16-pure", "fp16", "anyprecision", "8 bits", "muon",
        "muon of experts"}
"""Those whose formats make rounding visible."""


def figures(recipes: dict[str, dict[str, Any]], said: Path) -> None:
    """Losses, norms and a sum over the weights of three steps of each recipe, by the first process."""
    place = launched_process()
    if place is None:
        said.write_text(json.dumps({name: _steps(values) for name, values in recipes.items()}))
        return
    with joined(place, "cpu", 100) as world:
        found = {name: _steps(values) for name, values in recipes.items()}
        if world.rank == 0:
            said.write_text(json.dumps(found))


def _steps(values: dict[str, Any]) -> list[float]:
    step = Step(built(values))
    with step.build.process_settings():
        return _figures(step)


def _figures(step: Step) -> list[float]:
    data, found = global_batches_of(step.build), list[float]()
    for global_batch in step.global_batches(data, 0, 3):
        result = step(global_batch, step.build.recipe.learning_rate).read()
        found += [result.loss.mean, result.grad_norm or 0.0]
    found.append(step.evaluate([data.shard(step.build.world.rank, step.build.world.size).global_batch(0)]).loss.mean)
    with torch.no_grad():
        found.append(sum(full_tensor(p).double().abs().sum().item() for p in step.build.model.parameters()))
    assert step.generate([1, 2, 3], 2, 0.0, 0)
    return found


OFFLOADED = {"name": "fsdp", "cpu_offload": True}


@pytest.mark.parametrize(("parallel", "names"), [
    ("ddp", ["plain", "bf16"]), ("fsdp", ["plain", "llama", "chunked", "bf16 checkpointed", "fp16"]),
    (OFFLOADED, ["plain", "fp16", "unclipped"]),
], ids=["ddp", "fsdp", "fsdp-offloaded"])  # fmt: skip
def test_a_step_learns_what_it_learns_on_one_process(tiny, tmp_path, parallel, names):
    assert_same_steps(tiny, tmp_path, parallel, {name: BESIDE[name] for name in names})


@pytest.mark.cold
@pytest.mark.parametrize(("parallel", "beside"), [
    ("ddp", BESIDE | COMPILED | DDP_ALONE), ("fsdp", BESIDE | COMPILED), (OFFLOADED, BESIDE | COMPILED),
], ids=["ddp", "fsdp", "fsdp-offloaded"])  # fmt: skip
def test_every_technique_learns_what_it_learns_on_one_process(tiny, tmp_path, parallel, beside):
    assert_same_steps(tiny, tmp_path, parallel, beside)


def assert_same_steps(tiny, tmp_path, parallel, beside):
    alone = {name: {**tiny, "micro_batch_size": 3, "max_grad_norm": 0.5, **values} for name, values in beside.items()}
    figures(alone, tmp_path / "one")
    together = {name: {**values, "parallel": parallel} for name, values in alone.items()}
    assert in_processes(2, figures, together, tmp_path / "two", limit=400) == [0, 0]
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    for name, expected in one.items():
        within = 2e-2 if name in HALF else 2e-6
        assert two[name] == pytest.approx(expected, rel=within, abs=within), name


REFUSED = {"optimizer": ["adafactor", "muon", "adamw-8bit", "adamw-4bit"], "precision": ["fp8"], "compile": ["whole"],
           "checkpointing": ["segments"], "accumulation": ["by-block"], "offload": ["host"],
           "update": ["with-forward", "in-backward"]}  # fmt: skip


@pytest.mark.parametrize(("slot", "name"), [(slot, name) for slot, names in REFUSED.items() for name in names])
def test_what_parts_of_weights_cannot_serve_is_refused_by_name(tiny, slot, name):
    recipe = Recipe.from_dict({**tiny, "parallel": "fsdp", slot: name})
    reasons = recipe.refusals(PytorchBackend().device(recipe))
    assert any(name in reason and "write" in reason for reason in reasons)


@pytest.mark.parametrize("parallel", ["fsdp", "zero"])
def test_weights_of_an_evaluation_are_refused(tiny, parallel):
    recipe = Recipe.from_dict({**tiny, "parallel": parallel, "precision": {"name": "bf16", "full_eval": True}})
    assert any("precision.full_eval=false" in reason for reason in recipe.refusals(PytorchBackend().device(recipe)))


def test_copies_that_would_be_rounded_by_other_random_numbers_are_refused(tiny):
    rounded = {"name": "bf16-pure", "rounding": "stochastic"}
    recipe = Recipe.from_dict({**tiny, "parallel": "ddp", "precision": rounded})
    device = PytorchBackend().device(recipe)
    assert any("drift apart" in reason for reason in recipe.refusals(device))
    for changes in ({"parallel": "fsdp"}, {"precision": {**rounded, "rounding": "kahan"}}):
        other = Recipe.from_dict({**recipe.to_dict(), **changes})
        assert not any("drift" in reason for reason in other.refusals(device))


def test_the_contract_has_every_setting():
    assert [setting.cpu_offload for setting in Fsdp.representative_settings()] == [False, True]

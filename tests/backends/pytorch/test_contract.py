"""One contract over every rung of every technique: it is declared, applied, builds, steps and learns, or is refused."""

from __future__ import annotations

import math

import pytest
import torch

from tests.architectures import CAUSAL, MASKED, VOCAB, tiny_model
from tightfit.backends.pytorch.apply import ABSENT, APPLY
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import tensor_window
from tightfit.data import prepare
from tightfit.data.loading import WindowLoader
from tightfit.errors import Refused
from tightfit.models import model_facts
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.techniques import SLOTS

RUNGS = [(slot, rung) for slot, variants in SLOTS.items() for variant in variants for rung in variant.rungs()]
NEEDS = {
    "memory-budget": {"compile": {"name": "per-block", "backend": "aot_eager"}},
    "per-block": {"micro_batch_size": 4}, "whole": {"micro_batch_size": 4},  # one shape, compiled once
    "lion": {"learning_rate": 3e-3}, "sgd": {"learning_rate": 0.5}, "adafactor": {"learning_rate": 3e-2},
}
"""What a technique wants of the rest of the recipe to learn this task."""


def test_every_technique_is_applied_or_absent_with_a_reason():
    declared = {variant for variants in SLOTS.values() for variant in variants}
    assert set(APPLY) | set(ABSENT) == declared
    assert not set(APPLY) & set(ABSENT)
    assert all(reason.strip() for reason in ABSENT.values())


def identifier(value) -> str:
    return value if isinstance(value, str) else str(value)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("slot", "rung"), RUNGS, ids=identifier)
def test_a_rung_builds_steps_and_learns(slot, rung, kind, tiny):
    values = {**tiny, slot: rung, "device": kind, "batch_size": 8, "micro_batch_size": 3, "learning_rate": 1e-2,
              "data": {"source": "dummy", "samples": 9}, **NEEDS.get(rung.name, {})}
    backend = PytorchBackend()
    recipe = Recipe.from_dict(values)
    device = backend.device(recipe)
    if reasons := recipe.refusals(device):
        assert all(len(reason) > 20 for reason in reasons)
        with pytest.raises(Refused, match=slot):
            backend.build(resolve(recipe, device), device)
        return
    recipe = resolve(recipe, device)
    build = backend.build(recipe, device)
    data = prepare(recipe, model_facts(recipe))
    step = backend.step(build)
    window = tensor_window(WindowLoader(data.train, recipe).window(0))
    with build.session():
        losses = [step(window, recipe.learning_rate).read().loss.mean for _ in range(12)]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] == pytest.approx(math.log(128), abs=0.4)
    assert losses[-1] < losses[0] - 0.25
    assert all(p.grad is None for p in build.model.parameters())


@pytest.mark.parametrize("name", [*CAUSAL, *MASKED])
@pytest.mark.parametrize("checkpointing", ["every-block", "segments", "mlp", "attention", "selective"])
def test_checkpointing_with_accumulation_over_architectures(name, checkpointing):
    """The step's gradients with and without, bit for bit, through the whole of the built step."""

    def gradients(chosen: str) -> list[torch.Tensor]:
        recipe = Recipe.from_dict({
            "task": "causal-lm" if name in CAUSAL else "masked-lm", "checkpointing": chosen, "batch_size": 4,
            "micro_batch_size": 2, "data": {"source": "dummy", "samples": 6}, "seq_len": 12, "device": "cpu",
        })
        backend = PytorchBackend()
        device = backend.device(recipe)
        recipe = resolve(recipe, device)
        build = backend.build(recipe, device, tiny_model(name))
        assert build.facts.vocab_size == VOCAB
        step = backend.step(build)
        data = prepare(recipe, build.facts)
        step.accumulate(tensor_window(WindowLoader(data.train, recipe).window(0)))
        return [p.grad for p in build.model.parameters() if p.grad is not None]

    plain, recomputed = gradients("none"), gradients(checkpointing)
    assert len(plain) == len(recomputed) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_fp16_on_a_model_pretrained_in_bf16_warns(tmp_path):
    folder = tmp_path / "pretrained"
    tiny_model("llama").to(torch.bfloat16).save_pretrained(folder)
    recipe = Recipe.from_dict({"model": str(folder), "precision": "fp16", "device": "cpu"})
    backend = PytorchBackend()
    device = backend.device(recipe)
    build = backend.build(resolve(recipe, device), device)
    assert any("bf16" in note for note in build.notes)


def test_full_half_evaluation_gives_the_weights_back(tiny):
    recipe = Recipe.from_dict({**tiny, "precision": {"name": "bf16", "full_eval": True}})
    backend = PytorchBackend()
    device = backend.device(recipe)
    recipe = resolve(recipe, device)
    build = backend.build(recipe, device)
    step, data = backend.step(build), prepare(recipe, build.facts)
    before = [p.clone() for p in build.model.parameters()]
    seen = []
    build.model.register_forward_pre_hook(lambda module, args: seen.append(next(module.parameters()).dtype))
    total = step.evaluate([WindowLoader(data.train, recipe).window(0)])
    assert seen[0] == torch.bfloat16
    assert total.mean == pytest.approx(math.log(128), abs=0.4)
    assert all(torch.equal(a, b) for a, b in zip(before, build.model.parameters(), strict=True))

"""What PyTorch owes besides the contract that every backend keeps."""

from __future__ import annotations

import math

import pytest
import torch

from tests.architectures import CAUSAL, MASKED, VOCAB, tiny_model
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import tensor_global_batch
from tightfit.data import prepare
from tightfit.data.loading import GlobalBatchLoader
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe


def test_a_step_leaves_no_gradients(tiny):
    backend = PytorchBackend()
    recipe = Recipe.from_dict(tiny)
    device = backend.device(recipe)
    recipe = resolve(recipe, device)
    build = backend.build(recipe, device)
    global_batch = tensor_global_batch(GlobalBatchLoader(prepare(recipe, build.facts).train, recipe).global_batch(0))
    backend.step(build)(global_batch, recipe.learning_rate).read()
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
        step.accumulate(tensor_global_batch(GlobalBatchLoader(data.train, recipe).global_batch(0)))
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
    total = step.evaluate([GlobalBatchLoader(data.train, recipe).global_batch(0)])
    assert seen[0] == torch.bfloat16
    assert total.loss.mean == pytest.approx(math.log(128), abs=0.4)
    assert all(torch.equal(a, b) for a, b in zip(before, build.model.parameters(), strict=True))

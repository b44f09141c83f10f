"""What PyTorch owes besides the contract that every backend keeps."""

from __future__ import annotations

import math

import pytest
import torch

from tests.architectures import CAUSAL, MASKED, VOCAB, tiny_model
from tests.built import built, global_batches_of
from tightfit.backends.pytorch.batch import tensor_global_batch
from tightfit.backends.pytorch.step import Step


def test_a_step_leaves_no_gradients(tiny):
    build = built(tiny)
    Step(build)(tensor_global_batch(global_batches_of(build).global_batch(0)), build.recipe.learning_rate).read()
    assert all(p.grad is None for p in build.model.parameters())


@pytest.mark.parametrize("name", [*CAUSAL, *MASKED])
@pytest.mark.parametrize("checkpointing", ["every-block", "segments", "mlp", "attention", "selective"])
def test_checkpointing_with_accumulation_over_architectures(name, checkpointing):
    """The step's gradients with and without, bit for bit, through the whole of the built step."""

    def gradients(chosen: str) -> list[torch.Tensor]:
        build = built({
            "task": "causal-lm" if name in CAUSAL else "masked-lm", "checkpointing": chosen, "batch_size": 4,
            "micro_batch_size": 2, "data": {"source": "dummy", "samples": 6}, "seq_len": 12, "device": "cpu",
        }, tiny_model(name))
        assert build.facts.vocab_size == VOCAB
        Step(build).accumulate(tensor_global_batch(global_batches_of(build).global_batch(0)))
        return [p.grad for p in build.model.parameters() if p.grad is not None]

    plain, recomputed = gradients("none"), gradients(checkpointing)
    assert len(plain) == len(recomputed) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_fp16_on_a_model_pretrained_in_bf16_warns(tmp_path):
    folder = tmp_path / "pretrained"
    tiny_model("llama").to(torch.bfloat16).save_pretrained(folder)
    build = built({"model": str(folder), "precision": "fp16", "device": "cpu"})
    assert any("bf16" in note for note in build.notes)


def test_full_half_evaluation_gives_the_weights_back(tiny):
    build = built({**tiny, "precision": {"name": "bf16", "full_eval": True}})
    step = Step(build)
    before = [p.clone() for p in build.model.parameters()]
    seen = []
    build.model.register_forward_pre_hook(lambda module, args: seen.append(next(module.parameters()).dtype))
    total = step.evaluate([global_batches_of(build).global_batch(0)])
    assert seen[0] == torch.bfloat16
    assert total.loss.mean == pytest.approx(math.log(128), abs=0.4)
    assert all(torch.equal(a, b) for a, b in zip(before, build.model.parameters(), strict=True))

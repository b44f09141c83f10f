"""Streamed steps on a GPU: those of the resident step, in less of the device's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.architectures import tiny_model
from tests.backends.pytorch.techniques.by_block.streaming_cases import BY_BLOCK, HOST, SWEEPS, weights
from tightfit.backends.pytorch.assembly import assemble
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import TensorBatch, TensorGlobalBatch
from tightfit.backends.pytorch.step import Step
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe

pytestmark = pytest.mark.gpu
ALL = {**HOST, "offload": {"name": "host", "activations": 1}}
FIELDS: dict[str, Any] = {
    "data": {"source": "dummy"}, "batch_size": 6, "micro_batch_size": 2, "seq_len": 256, "precision": "fp32",
    "attention": "eager", "compile": "off", "loss": "plain", "checkpointing": "every-block", "optimizer": "adamw",
}


def taken(**fields: Any) -> tuple[list[Any], dict[str, torch.Tensor], int]:
    """Results of four steps, the weights behind them, and the device's peak over the last."""
    recipe = Recipe.from_dict({**FIELDS, **fields})
    device = PytorchBackend().device(recipe)
    cuda = torch.device("cuda")
    model = tiny_model("gpt2", n_layer=12, n_embd=1024, n_head=16, vocab_size=1024, n_positions=256,
                       tie_word_embeddings=False)  # drawn on the processor: the same weights for every run
    step = Step(assemble(resolve(recipe, device), device, cuda, model))
    generator = torch.Generator().manual_seed(0)
    results = []
    with step.build.process_settings():
        for _ in range(4):
            torch.cuda.reset_peak_memory_stats()
            ids = [torch.randint(0, 1024, (2, 256), generator=generator) for _ in range(3)]
            batches = tuple(TensorBatch(inputs={"input_ids": each}, labels=each) for each in ids)
            results.append(step(TensorGlobalBatch(micro_batches=batches, count=6 * 256, samples=6, tokens=6 * 256,
                                                  origin="test"), 1e-3).read())
        step.update.flush()
    return results, {name: weight.cpu() for name, weight in weights(step).items()}, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("fields", [BY_BLOCK, HOST, SWEEPS, ALL], ids=["resident", "host", "sweeps", "all"])
def test_a_streamed_step_is_the_resident_one(fields):
    plain, wanted, most = taken()
    streamed, got, least = taken(**fields)

    assert [result.loss.sum for result in streamed] == pytest.approx([result.loss.sum for result in plain], rel=1e-5)
    for name, weight in wanted.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-5)
    if "offload" in fields:
        assert least < 0.6 * most


def test_weights_that_wait_in_host_memory_are_drawn_as_the_gpu_draws_them():
    def built(**fields: Any) -> tuple[dict[str, torch.Tensor], int, int]:
        overrides = {"n_layer": 6, "n_embd": 1024, "n_head": 16, "n_positions": 256}
        recipe = Recipe.from_dict({**FIELDS, "model": "gpt2", "model_overrides": overrides, "vocab_size": 1024,
                                   **fields})
        device = PytorchBackend().device(recipe)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = assemble(resolve(recipe, device), device, torch.device("cuda")).model
        taken = torch.cuda.max_memory_allocated() - before
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        return {name: tensor.cpu() for name, tensor in model.state_dict().items()}, taken, whole

    (wanted, _, _), (got, taken, whole) = built(), built(**HOST)

    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert taken < 0.3 * whole

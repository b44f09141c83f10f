"""Frozen weights beside every technique that recomputes, packs, cuts or compiles: the same losses and weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.architectures import tiny_model
from tests.backends.pytorch.experts.experts_cases import moe_model
from tests.backends.pytorch.techniques.by_block.streaming_cases import BY_BLOCK, Run, run, same
from tests.plain import CPU, PLAIN
from tightfit.backends.pytorch.assembly import assemble, bare_build
from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.techniques.adapters.apply import low_rank
from tightfit.recipe import Recipe

FROZEN: dict[str, dict[str, Any]] = {
    "nf4": {"trainable": {"name": "lora", "rank": 4}, "base": "nf4"},
    "dora": {"trainable": {"name": "dora", "dropout": 0.1}, "base": "int8"},
    "layers": {"trainable": {"name": "layers", "names": ["lm_head", "layers.2", "norm"]}},
}


@functools.cache
def plain(name: str) -> Run:
    """A step with nothing else beside."""
    return run("llama", 1, **FROZEN[name])


@pytest.mark.parametrize(("name", "checkpointing"), [
    *(("nf4", name) for name in ("every-block", "every-nth", "segments", "mlp", "attention", "selective")),
    ("nf4", {"name": "selective", "keep": "attention"}), ("nf4", {"name": "selective", "keep": "every-other-matmul"}),
    ("dora", "every-block"), ("dora", "selective"), ("layers", "every-block"), ("layers", "segments"),
], ids=str)
def test_recomputation_over_inputs_that_need_no_gradient_changes_nothing(name, checkpointing):
    assert same(plain(name), run("llama", 1, **FROZEN[name], checkpointing=checkpointing))


@pytest.mark.parametrize(("name", "says"), [("olmoe", False), ("shared expert", True)])
def test_layers_that_peft_takes_for_experts_are_said(name, says):
    recipe = Recipe.from_dict({"trainable": "lora", "precision": "fp32"})
    build = low_rank(recipe.trainable, bare_build(recipe, CPU, torch.device("cpu"), moe_model(name)))
    assert any("down_proj, gate_proj, up_proj as names of its experts" in note for note in build.notes) == says


@pytest.mark.parametrize("name", ["nf4", "layers"])
@pytest.mark.parametrize("fields", [BY_BLOCK, {"loss": {"name": "chunked", "tokens": 20}}], ids=["by-block", "chunks"])
def test_work_block_by_block_and_chunks_of_the_loss_change_rounding_alone(name, fields):
    found = run("llama", 1, **FROZEN[name], **fields)
    torch.testing.assert_close(plain(name).weights, found.weights, rtol=1e-3, atol=1e-5)


def test_compiled_blocks_change_rounding_alone():
    found = []
    for fields in ({}, {"compile": {"name": "per-block", "backend": "aot_eager"}}):
        recipe = Recipe.from_dict({**PLAIN, "checkpointing": "every-block", "batch_size": 2, "micro_batch_size": 2,
                                   "seq_len": 8, **FROZEN["nf4"], **fields})
        model = tiny_model("llama", num_hidden_layers=1)
        build = assemble(recipe, CPU, torch.device("cpu"), model)
        ids = torch.arange(16).view(2, 8)
        build.loss_sum(TensorBatch(inputs={"input_ids": ids}, labels=ids)).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)

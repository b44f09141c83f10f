"""Models that transformers wrote: the same logits, trained, and written so that PyTorch reads them again."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from tests.architectures import VOCAB, tiny_model
from tests.backends.jax.cases import build, quickly
from tightfit.backends.jax.decoders import rope_frequencies
from tightfit.backends.jax.forward import logits
from tightfit.backends.jax.step import Step
from tightfit.backends.pytorch.models import build_model
from tightfit.errors import ModelError
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS

IDS = np.random.default_rng(0).integers(0, VOCAB, (2, 8))
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip


def saved(folder, name, dtype=torch.float32, **changes):
    """A folder with the tiny model of that name, and the model."""
    model = tiny_model(name, **changes).to(dtype).eval()
    model.save_pretrained(folder)
    return str(folder), model


def our_logits(step, ids=IDS):
    return np.asarray(quickly(lambda params: logits(step.build, params, {"input_ids": ids}), step.state["params"]))


@pytest.mark.parametrize(("name", "changes"), [
    ("gpt2", {}), ("gpt2", {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "relu"}),
    ("llama", {}), ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "attention_bias": True}),
    ("qwen2", {}), ("mistral", {"sliding_window": None}),
], ids=str)
def test_logits_are_those_of_transformers(name, changes, tmp_path):
    folder, model = saved(tmp_path / "model", name, **changes)
    step = Step(build(model=folder, vocab_size=None, attention="eager" if changes else "sdpa"))
    with torch.no_grad():
        theirs = model(torch.tensor(IDS)).logits
    np.testing.assert_allclose(our_logits(step), theirs, atol=1e-4)


def test_a_checkpoint_without_the_prefix_and_with_buffers_is_read(tmp_path):
    folder, model = saved(tmp_path / "model", "gpt2", dtype=torch.bfloat16)
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    save_file(tensors, path)
    step = Step(build(model=folder, vocab_size=None))
    with torch.no_grad():
        theirs = model.float()(torch.tensor(IDS)).logits
    np.testing.assert_allclose(our_logits(step), theirs, atol=1e-4)


@pytest.mark.parametrize("model", ["gpt2", "transformer-156m"])
def test_what_is_written_is_read_in_pytorch_and_here(model, tmp_path):
    overrides = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 12} if model == "gpt2" else {}
    step = Step(build(model=model, model_overrides=overrides))
    step.export(tmp_path / "out", None)
    ids = IDS % 64
    recipe = Recipe.from_dict({"model": str(tmp_path / "out"), "vocab_size": 64})
    module = build_model(recipe, TASKS["causal-lm"]).model.eval()
    with torch.no_grad():
        theirs = module(torch.tensor(ids)).logits
    np.testing.assert_allclose(our_logits(step, ids), theirs, atol=1e-5)
    again = Step(build(model=str(tmp_path / "out"), vocab_size=64))
    assert np.array_equal(our_logits(again, ids), our_logits(step, ids))


def test_llama3_frequencies_are_those_of_transformers():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 5e5}
    config = transformers.LlamaConfig(rope_parameters=rope)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    np.testing.assert_allclose(rope_frequencies(rope, config.head_dim), theirs, rtol=2e-6)


@pytest.mark.parametrize(("changes", "words"), [
    ({"model": "bert-base", "task": "masked-lm"}, "masked-lm model of type 'bert'.*backend=pytorch"),
    ({"model": "mistral-7b", "model_overrides": {"sliding_window": 8}}, "sliding_window=null"),
    ({"model": "tests.architectures:tiny_model"}, "backend=pytorch"),
    ({"task": "sequence-classification"}, "write task=causal-lm"),
], ids=str)
def test_what_is_not_here_says_what_to_write(changes, words):
    with pytest.raises(ModelError, match=words):
        build(**changes)


def test_weights_of_another_model_are_refused(tmp_path):
    folder, _ = saved(tmp_path / "model", "llama")
    with pytest.raises(ModelError, match=r"differ in .*layers\.2"):
        Step(build(model=folder, vocab_size=None, model_overrides={"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"has shape .*vocab_size"):
        Step(build(model=folder, vocab_size=VOCAB + 8))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "llama"

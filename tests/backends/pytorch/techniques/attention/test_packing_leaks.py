"""Documents that share a row do not see each other: not their tokens, not their positions."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.architectures import CAUSAL, MASKED
from tests.backends.pytorch.techniques.attention.attention_cases import (
    INSIDE_FP32,
    batch_of,
    built,
    documents,
    make,
    task_of,
)
from tightfit.errors import ModelError
from tightfit.models import TransformerConfig
from tightfit.techniques.attention import Attention, Eager, Sdpa

OURS = (*CAUSAL, *MASKED, "gemma2", "gemma3", "gpt_oss", "modernbert", "biogpt")
OWN = ("gpt_neo", "gptj", "falcon", "ibert", "deepseek_v32")
ROWS = ("mobilebert", "longformer", "mra", "big_bird", "nystromformer")
"""Encoders that mix, or choose, the tokens of a row by their places in it."""
BOTH = (Eager(), Sdpa())


@pytest.mark.parametrize("name", [*OURS, *OWN])
def test_each_document_reads_as_if_alone(name: str) -> None:
    task, rounding = task_of(name), 1e-6 if name in INSIDE_FP32 else 1e-10
    for technique in BOTH:
        model = make(name)
        build = built(model, technique, task)
        batch = batch_of("packed", task)
        other = {**batch.inputs, "input_ids": batch.inputs["input_ids"].clone()}
        other["input_ids"][0, 7:19] = batch_of("none", task, seed=1).inputs["input_ids"][0, 7:19]
        with torch.no_grad():
            logits = build.logits(batch)
            perturbed = build.logits(dataclasses.replace(batch, inputs=other))
            for row, place, alone in documents(batch):
                apart = (logits[row : row + 1, place] - build.logits(alone)).abs().max()
                assert apart < rounding, (technique, row, place)
        change = (logits - perturbed).abs().amax(-1)
        assert change[0, 7:19].min() > 1e-6
        change[0, 7:19] = 0.0
        assert change.max() < 1e-12, technique


@pytest.mark.parametrize("technique", BOTH)
def test_gradients_of_a_packed_row_are_the_sum_over_its_documents(technique: Attention) -> None:
    model = make("llama").train()
    build = built(model, technique)
    batch = batch_of("packed", "causal-lm")
    build.logits(batch).pow(2).sum().backward()
    together = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for _, _, alone in documents(batch):
        build.logits(alone).pow(2).sum().backward()
    apart = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b in zip(together, apart, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


def test_the_bundled_transformer() -> None:
    from tightfit.backends.pytorch.transformer import Transformer

    shape = TransformerConfig(vocab_size=96, hidden_size=32, num_layers=2, head_dim=8, num_heads=4, max_seq_len=40,
                              num_outputs=96, dropout_rate=0.0)
    torch.manual_seed(0)
    model = Transformer(shape).double().eval()
    batch = batch_of("packed", "causal-lm")
    for technique in BOTH:
        build = built(model, technique)
        with torch.no_grad():
            logits = build.logits(batch)
            for row, place, alone in documents(batch):
                assert (logits[row : row + 1, place] - build.logits(alone)).abs().max() < 1e-10


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["bloom", "mamba", "bart", "deberta", "llama4", "modernvbert", *ROWS])
def test_models_that_cannot_keep_documents_apart_say_so(name: str) -> None:
    import transformers

    if name == "deberta":
        model = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(
            vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32))
    elif name == "modernvbert":  # whose sliding windows are in masks that it makes itself
        config = make("modernbert").config
        model = transformers.ModernVBertForMaskedLM(transformers.ModernVBertConfig(text_config=config, vision_config={
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
            "image_size": 16, "patch_size": 8}))
    elif name == "bart":
        model = transformers.BartForCausalLM(transformers.BartConfig(
            vocab_size=96, d_model=32, decoder_layers=1, encoder_layers=1, decoder_attention_heads=2,
            encoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=40))
    else:
        model = make(name)
    with pytest.raises(ModelError, match=r"write data\.packing=false"):
        built(model, Sdpa()).logits(batch_of("packed", "causal-lm"))

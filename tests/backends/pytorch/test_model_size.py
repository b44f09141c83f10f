"""Parameters and FLOPs from a model on the meta device, against published sizes and the products that really run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.architectures import TASK_OF, VOCAB, tiny_config
from tightfit.backends.pytorch.model_size import model_size
from tightfit.backends.pytorch.models import build_model
from tightfit.errors import ModelError
from tightfit.recipe import Recipe
from tightfit.tasks import get_task

LENGTH = 16
NUMBERS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 40, "pad_token_id": 0,
}
MORE: dict[str, tuple[Any, str]] = {
    "gemma2": (transformers.Gemma2Config(**NUMBERS, head_dim=16), "causal-lm"),
    "falcon": (transformers.FalconConfig(**{**NUMBERS, "num_key_value_heads": None}), "causal-lm"),
    "cohere": (transformers.CohereConfig(**NUMBERS), "causal-lm"),
    "llama, classes": (transformers.LlamaConfig(**NUMBERS), "sequence-classification"),
    "bert, classes": (tiny_config("bert"), "sequence-classification"),
    "t5, gated": (transformers.T5Config(d_model=32, d_ff=48, d_kv=16, num_layers=2, num_decoder_layers=3, num_heads=4,
                                        feed_forward_proj="gated-gelu", vocab_size=VOCAB), "seq2seq"),
    # Of experts those count that are used.
    "mixtral": (transformers.MixtralConfig(**NUMBERS, num_local_experts=6), "causal-lm"),
    "qwen2_moe": (transformers.Qwen2MoeConfig(**NUMBERS, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2,
                                              shared_expert_intermediate_size=40, decoder_sparse_step=2), "causal-lm"),
    "olmoe": (transformers.OlmoeConfig(**NUMBERS, num_experts=6, num_experts_per_tok=2), "causal-lm"),
}
CASES = {**{name: (tiny_config(name), task) for name, task in TASK_OF.items()}, **MORE}


def recipe(config: Any, task: str, folder: Path, **fields: Any) -> Recipe:
    """Of a configuration in a folder, without weights."""
    config.save_pretrained(folder)
    return Recipe(model=str(folder), task=task, seq_len=LENGTH, **fields)


def really(made: Recipe) -> tuple[int, int]:
    """Parameters of the model, and FLOPs of the products that run for one sample, but for rotary positions' angles."""
    task = get_task(made.task)
    model: nn.Module = build_model(made, task).model.eval()
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.config._attn_implementation = part.config._experts_implementation = "eager"
    ids = torch.randint(3, VOCAB, (1, LENGTH))
    inputs = {"input_ids": ids}
    if made.task == "image-classification":
        size = model.config.image_size
        inputs = {"pixel_values": torch.randn(1, 3, size, size)}
    elif made.task == "seq2seq":
        inputs["decoder_input_ids"] = ids
    with FlopCounterMode(display=False) as counter:
        model(**inputs).logits.sum().backward()
    counts = counter.get_flop_counts()
    angles = sum(sum(ops.values()) for module, ops in counts.items() if module.endswith("rotary_emb"))
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops() - angles


@pytest.mark.parametrize("name", CASES)
def test_a_model_takes_what_really_runs(name: str, tmp_path: Path) -> None:
    made = recipe(*CASES[name], tmp_path)
    parameters, flops = really(made)
    size = model_size(made)
    assert size.parameters == parameters
    assert size.flops == pytest.approx(flops, rel=5e-4)  # rotary positions' angles of tiny models


@pytest.mark.parametrize(("name", "task", "parameters", "gigaflops"), [
    ("gpt2", "causal-lm", 124_439_808, 408.481431552),
    ("bert-base", "masked-lm", 109_514_298, 363.73266432),
    ("t5-small", "seq2seq", 60_506_624, 214.815473664),
    ("llama-3.1-8b", "causal-lm", 8_030_261_248, 23466.62756352),
    ("vit-base", "image-classification", 86_567_656, 105.151758336),
    ("transformer-156m", "causal-lm", 155_877_376, 508.953624576),
])
def test_bundled_sizes(name: str, task: str, parameters: int, gigaflops: float) -> None:
    """As published (OpenAI, Meta), and by PaLM's convention from the configurations' numbers, at 512 tokens."""
    size = model_size(Recipe(model=name, task=task, seq_len=512))
    assert size.parameters == parameters
    assert size.flops / 1e9 == pytest.approx(gigaflops, rel=1e-7)


@pytest.mark.parametrize(("name", "parameters", "active"), [
    ("olmoe-1b-7b", 6_919_161_856, 1_282_017_280),
    ("gpt-oss-20b", 20_914_757_184, 4_187_440_704),  # of them 0.58 billion of the input embedding, left out of 3.61
    ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
])
def test_experts_have_total_and_active_parameters(name: str, parameters: int, active: int) -> None:
    """As published: 6.9 and 1.3 billion (AI2), 20.9 and 3.6 (OpenAI), 30.5 and 3.3 (Qwen)."""
    size = model_size(Recipe(model=name, seq_len=64))
    assert (size.parameters, size.active_parameters) == (parameters, active)
    assert size.flops / 64 < 6 * active * 1.05


def test_flops_follow_six_n_d() -> None:
    """PaLM's rule, for GPT-2: 6 times the weights that are multiplied, and 12 for layer, width and position."""
    weights = 12 * 12 * 768**2 + 50257 * 768
    assert model_size(Recipe(model="gpt2")).flops == 1024 * (6 * weights + 12 * 12 * 768 * 1024)


def test_what_pads_the_vocabulary_is_no_part_of_the_model() -> None:
    assert model_size(Recipe(model="gpt2", pad_vocab_to=64)) == model_size(Recipe(model="gpt2"))


def test_the_random_numbers_of_a_run_stay_what_they_are() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    model_size(Recipe(model="gpt2", seq_len=8))
    assert torch.equal(torch.rand(4), expected)


def reads_values() -> nn.Module:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.embed(input_ids[input_ids.nonzero()[:, 0]])

    return Reads()


def test_a_model_that_needs_values_has_parameters_alone() -> None:
    size = model_size(Recipe(model=f"{__name__}:reads_values", vocab_size=9))
    assert (size.parameters, size.flops, size.values) == (36, 0, 0)


def test_a_model_that_cannot_be_built_says_so() -> None:
    with pytest.raises(ModelError, match="task"):
        model_size(Recipe(model="transformer-156m", task="seq2seq"))

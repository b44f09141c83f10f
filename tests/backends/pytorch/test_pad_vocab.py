"""A padded vocabulary changes neither the loss, nor the real logits, nor the gradients; and is not saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.architectures import CAUSAL, MASKED, SEQ2SEQ, VOCAB, tiny_model
from tightfit.backends.pytorch.padding import pad_vocab
from tightfit.backends.pytorch.saved_model import save_model
from tightfit.backends.pytorch.transformer import Transformer
from tightfit.errors import ModelError
from tightfit.models import TransformerConfig

MULTIPLE = 64
ROWS = 128
NAMES = (*CAUSAL, *MASKED, *SEQ2SEQ, "transformer")


def make(name: str) -> nn.Module:
    if name != "transformer":
        return tiny_model(name).train()
    torch.manual_seed(0)
    return Transformer(TransformerConfig(
        vocab_size=VOCAB, num_outputs=VOCAB, hidden_size=32, num_layers=2, num_heads=4, head_dim=8, max_seq_len=16,
        dropout_rate=0.0,
    ))


def run(name: str, model: nn.Module) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The logits, the loss over the real vocabulary, and every gradient."""
    ids = torch.randint(5, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if name in SEQ2SEQ else {})}
    logits = model(**inputs).logits
    loss = F.cross_entropy(logits[..., :VOCAB].flatten(0, 1), ids.flatten(), reduction="sum")
    loss.backward()
    return logits.detach(), loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_loss_logits_and_gradients_stay(name: str) -> None:
    plain, padded = make(name), make(name)
    pad_vocab(padded, MULTIPLE, VOCAB)
    logits, loss, gradients = run(name, plain)
    wide_logits, wide_loss, wide_gradients = run(name, padded)
    assert wide_logits.shape[-1] == ROWS
    torch.testing.assert_close(wide_logits[..., :VOCAB], logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(wide_loss, loss, rtol=1e-6, atol=1e-6)
    assert wide_gradients.keys() == gradients.keys()
    grown = 0
    for key, gradient in gradients.items():
        wide = wide_gradients[key]
        if wide.shape != gradient.shape:
            grown += 1
            assert wide.shape == (ROWS, *gradient.shape[1:])
            assert not wide[VOCAB:].any()
        torch.testing.assert_close(wide[: len(gradient)], gradient, rtol=1e-5, atol=1e-5)
    assert grown >= 1
    assert len(list(padded.parameters())) == len(list(plain.parameters()))  # what was tied still is


@pytest.mark.parametrize("name", ["gpt2", "bert", "bart", "llama", "transformer"])
def test_saved_without_padding(name: str, tmp_path: Path) -> None:
    plain, padded = make(name), make(name)
    pad_vocab(padded, MULTIPLE, VOCAB)
    save_model(plain, tmp_path / "plain")
    save_model(padded, tmp_path / "padded")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "padded" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    assert run(name, padded)[0].shape[-1] == ROWS


def test_a_round_vocabulary_is_left_alone() -> None:
    model = make("gpt2")
    before = list(model.parameters())
    pad_vocab(model, 32, VOCAB)
    assert all(one is two for one, two in zip(before, model.parameters(), strict=True))
    assert run("gpt2", model)[0].shape[-1] == VOCAB


def test_padding_draws_no_random_number() -> None:
    model, state = make("gpt2"), torch.get_rng_state()
    pad_vocab(model, MULTIPLE, VOCAB)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match=r"pad_vocab_to: ViTFor\w+ has no token embedding"):
        pad_vocab(tiny_model("vit"), MULTIPLE, VOCAB)
    with pytest.raises(ModelError, match="pad_vocab_to: Linear has no token embedding"):
        pad_vocab(nn.Linear(4, VOCAB), MULTIPLE, VOCAB)
    with pytest.raises(ModelError, match=r"100 tokens.* 96 rows; write vocab_size: 96"):
        pad_vocab(make("gpt2"), MULTIPLE, 100)

"""The bundled transformer: its size, its mathematics, its initial weights, and the attention it can be switched to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from tightfit.backends.pytorch.models import parameter_count
from tightfit.backends.pytorch.techniques.attention.functions import EAGER, SDPA
from tightfit.backends.pytorch.transformer import Transformer
from tightfit.errors import ModelError
from tightfit.models import TransformerConfig

TINY = TransformerConfig(
    vocab_size=40, num_outputs=48, hidden_size=24, num_layers=2, num_heads=3, head_dim=10, max_seq_len=16
)
IDS = torch.arange(20).view(2, 10)


def tiny(shape: TransformerConfig = TINY, dtype: torch.dtype = torch.float64) -> Transformer:
    torch.manual_seed(0)
    return Transformer(shape).eval().to(dtype)


def as_written(model: Transformer, ids: Tensor) -> Tensor:
    """The same function from its formulas, over the model's own weights."""
    weights = model.state_dict()
    width = TINY.hidden_size

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def dense(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = weights["embed.weight"][ids] + weights["pos_emb"][: ids.shape[1]]
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    for i in range(TINY.num_layers):
        mlp, attn = f"layers.{i}.mlp", f"layers.{i}.attn"
        x = x + dense(gelu(dense(norm(x, f"{mlp}.pre_norm"), f"{mlp}.input_layer")), f"{mlp}.output_layer")
        kernel = weights[f"{attn}.qkv.weight"].T.reshape(width, TINY.num_heads, 3 * TINY.head_dim)
        bias = weights[f"{attn}.qkv.bias"].view(TINY.num_heads, 3 * TINY.head_dim)
        qkv = torch.einsum("btf,fhd->bthd", norm(x, f"{attn}.pre_norm"), kernel) + bias
        q, k, v = qkv.split(TINY.head_dim, dim=-1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q * TINY.head_dim**-0.5, k)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~causal, -1e300).softmax(-1), v)
        x = x + dense(mixed.flatten(-2), f"{attn}.output_layer")
    return dense(norm(x, "post_norm"), "output_layer")


def test_parameters_at_the_full_configuration() -> None:
    with torch.device("meta"):
        assert parameter_count(Transformer(TransformerConfig())) == 155_877_376


@pytest.mark.parametrize("kernel", [SDPA, EAGER])
def test_it_computes_what_its_formulas_say(kernel: str) -> None:
    model = tiny()
    for name, parameter in model.named_parameters():  # biases and norms start at values that hide mistakes
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("norm.weight" in name))
    model.config._attn_implementation = kernel
    logits = model(IDS).logits
    assert logits.shape == (2, 10, TINY.num_outputs)
    torch.testing.assert_close(logits, as_written(model, IDS), rtol=1e-11, atol=1e-11)


def test_causal_or_not() -> None:
    changed = IDS.clone()
    changed[:, 6] += 1
    causal = tiny()
    assert torch.equal(causal(IDS).logits[:, :6], causal(changed).logits[:, :6])
    both = tiny(replace(TINY, causal_mask=False))
    assert not torch.isclose(both(IDS).logits[:, 0], both(changed).logits[:, 0]).all(-1).any()


def test_positions_may_restart() -> None:
    model = tiny()
    positions = torch.arange(10).expand(2, -1)
    assert torch.equal(model(IDS, position_ids=positions).logits, model(IDS).logits)
    restarted = torch.cat([torch.arange(4), torch.arange(6)]).expand(2, -1)
    starts = torch.tensor([0, 4, 10, 14, 20], dtype=torch.int32).view(1, 1, 1, -1)
    packed = model(IDS, attention_mask=starts, position_ids=restarted).logits
    alone = [model(part).logits for part in (IDS[:, :4], IDS[:, 4:])]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kernel", [SDPA, EAGER])
def test_padding_is_not_seen(kernel: str) -> None:
    model = tiny(replace(TINY, causal_mask=False))
    model.config._attn_implementation = kernel
    real = torch.ones_like(IDS)
    real[1, 7:] = 0
    logits = model(IDS, attention_mask=real).logits
    torch.testing.assert_close(logits[1:, :7], model(IDS[1:, :7]).logits, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(logits[:1], model(IDS[:1]).logits, rtol=1e-11, atol=1e-11)


def test_logits_are_at_least_fp32() -> None:
    assert tiny(dtype=torch.bfloat16)(IDS).logits.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert tiny(dtype=torch.float32)(IDS).logits.dtype == torch.float32
    assert tiny()(IDS).logits.dtype == torch.float64


def test_initial_weights() -> None:
    torch.manual_seed(0)
    shape = TransformerConfig(
        vocab_size=500, hidden_size=256, num_layers=1, num_heads=4, head_dim=96, max_seq_len=128, num_outputs=300
    )
    model = Transformer(shape)
    fans = {"mlp.input_layer": 256, "mlp.output_layer": 1024, "attn.qkv": 256, "attn.output_layer": 384}
    for name, fan_in in fans.items():
        layer = model.layers[0].get_submodule(name)
        weight = layer.get_parameter("weight")
        assert weight.std().item() == pytest.approx(fan_in**-0.5, rel=0.01)
        assert weight.abs().max().item() <= 2 * fan_in**-0.5 / 0.8796 + 1e-6
        assert not layer.get_parameter("bias").any()
    assert model.embed.weight.std().item() == pytest.approx(256**-0.5, rel=0.01)
    assert model.pos_emb.std().item() == pytest.approx(0.02, rel=0.02)
    # so that the first loss is near that of guessing evenly
    loss = F.cross_entropy(model.eval()(torch.randint(500, (2, 64))).logits.flatten(0, 1), torch.randint(300, (128,)))
    assert loss.item() == pytest.approx(math.log(300), abs=1.0)


def test_dropout_is_on_in_training_only() -> None:
    model = tiny()
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    model.train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits)


def test_it_is_built_and_run_on_fake_tensors() -> None:
    with FakeTensorMode():
        logits = Transformer(TINY)(torch.zeros((2, 10), dtype=torch.int64)).logits
    assert logits.shape == (2, 10, TINY.num_outputs)


def test_another_softmax_format_is_refused() -> None:
    with pytest.raises(ModelError, match=r"softmax_dtype: 'bfloat16'.*write float32"):
        Transformer(replace(TINY, softmax_dtype="bfloat16"))

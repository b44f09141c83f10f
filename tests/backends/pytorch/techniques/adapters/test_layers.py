"""Factors beside frozen weights: gradients of the plain layer, peft's own forward pass, and what is trained."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from tests.architectures import TASK_OF, tiny_model
from tests.plain import CPU, PLAIN
from tightfit.backends.pytorch.assembly import assemble
from tightfit.backends.pytorch.techniques.adapters.layers import frozen_layers, full_weight, merged_weight
from tightfit.errors import Refused
from tightfit.recipe import Recipe

FIELDS = {**PLAIN, "batch_size": 2, "micro_batch_size": 2, "seq_len": 8, "device": "cpu"}
KNOBS = {"rank": 4, "alpha": 12}
FORMS = {
    "lora": {"name": "lora", **KNOBS}, "rslora": {"name": "lora", "rslora": True, **KNOBS},
    "dropout": {"name": "lora", "dropout": 0.3, **KNOBS}, "dora": {"name": "dora", **KNOBS},
    "dora-dropout": {"name": "dora", "dropout": 0.3, **KNOBS},
}


def adapted(model: nn.Module, name: str = "gpt2", **fields) -> nn.Module:
    recipe = Recipe.from_dict({**FIELDS, "task": TASK_OF[name], **fields})
    return assemble(recipe, CPU, torch.device("cpu"), model).model


def shake(model: nn.Module) -> None:
    """Second factors that are not zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_b" in name or "lora_B" in name:
                parameter.normal_(std=0.1)


class Two(nn.Module):
    """A block of each kind of linear layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), Conv1D(6, 10)) for _ in range(2))

    def forward(self, input_ids):
        for block in self.blocks:
            input_ids = block(input_ids)
        return input_ids


class Encoder(nn.Module):
    """Torch's own encoder layers, whose fast path in evaluation reads the weights of their linear layers alone."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, input_ids):
        padding = torch.zeros(input_ids.shape[:2], dtype=torch.bool)
        padding[0, -1] = True
        return self.encoder(input_ids, src_key_padding_mask=padding)[0, :-1]


@pytest.mark.parametrize(("form", "base"), [("lora", "as-is"), ("dora", "as-is"), ("lora", "int8")])
def test_evaluation_counts_what_is_added_to_torchs_own_encoder_layers(form, base):
    torch.manual_seed(0)
    model, values = adapted(Encoder(), trainable=FORMS[form], base=base, vocab_size=8), torch.randn(2, 5, 8)
    plain = model.eval()(values).detach()
    shake(model)
    expected = model(values)
    with torch.no_grad():
        found = model(values)
    assert not torch.allclose(found, plain, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_evaluation_counts_pefts_adapter_of_torchs_own_encoder_layers():
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(Encoder(), peft.LoraConfig(target_modules=["linear1", "linear2"]))
    model, values = adapted(wrapped, vocab_size=8).eval(), torch.randn(2, 5, 8)
    plain = model(values).detach()
    shake(model)
    assert not torch.allclose(model(values), plain, atol=1e-3)


@pytest.mark.parametrize("base", ["as-is", "int8", "nf4"])
def test_gradients_are_those_of_the_layer_with_its_addition_worked_in(base):
    """d/dA = scale B' G and d/dB = scale G A', of the gradient G of the whole weight."""
    torch.manual_seed(0)
    model = adapted(Two(), trainable=FORMS["lora"], base=base, vocab_size=8).double()
    shake(model)
    values = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    model(values).square().sum().backward()

    weights, plain, whole = [], values.detach().clone().requires_grad_(), values
    whole = plain
    for block in model.blocks:
        for layer in (block[0], block[2]):
            weight = merged_weight(layer, torch.float64).detach().requires_grad_()
            weights.append((layer, weight))
            whole = F.linear(whole, weight, layer.bias)
            whole = whole.tanh() if layer is block[0] else whole
    whole.square().sum().backward()

    torch.testing.assert_close(values.grad, plain.grad, rtol=1e-12, atol=1e-12)
    for layer, weight in weights:
        scale = layer.added.scale
        torch.testing.assert_close(layer.lora_a.grad, scale * layer.lora_b.T @ weight.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer.lora_b.grad, scale * weight.grad @ layer.lora_a.T, rtol=1e-12, atol=1e-12)
        assert layer.weight is None or layer.weight.grad is None
        assert layer.bias.grad is None


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("form", FORMS)
def test_the_forward_pass_and_the_gradients_are_pefts(name, form):
    ours = tiny_model(name).double()
    knobs = {"rslora": False, "dropout": 0.0, **FORMS[form]}
    config = peft.LoraConfig(r=4, lora_alpha=12, lora_dropout=knobs["dropout"], use_rslora=knobs["rslora"],
                             use_dora=knobs["name"] == "dora", target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fan_in_fan_out, which it finds by itself
        theirs = peft.get_peft_model(copy.deepcopy(ours), config).double().train()
    ours = adapted(ours, name, trainable=FORMS[form]).double()
    layers = dict(frozen_layers(ours))
    shake(ours)
    found = {}
    with torch.no_grad():
        for path, layer in layers.items():
            other = theirs.base_model.model.get_submodule(path)
            other.lora_A["default"].weight.copy_(layer.lora_a)
            other.lora_B["default"].weight.copy_(layer.lora_b)
            if knobs["name"] == "dora":
                other.lora_magnitude_vector["default"].weight.copy_(layer.lora_magnitude)
            found[path] = other
    assert len([m for m in theirs.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]) == len(layers) > 0

    ids = torch.arange(16).view(2, 8)
    results = []
    for model in (ours, theirs):
        torch.manual_seed(3)
        logits = model(input_ids=ids).logits
        logits.square().mean().backward()
        results.append(logits)
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
    for path, layer in layers.items():
        for mine, part in ((layer.lora_a, "lora_A"), (layer.lora_b, "lora_B")):
            torch.testing.assert_close(mine.grad, getattr(found[path], part)["default"].weight.grad,
                                       rtol=1e-9, atol=1e-12)
        if knobs["name"] == "dora":
            other = found[path].lora_magnitude_vector["default"].weight
            torch.testing.assert_close(layer.lora_magnitude.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["lora", "dora"])
@pytest.mark.parametrize("base", ["as-is", "bf16", "fp16", "int8", "nf4"])
def test_a_model_starts_as_its_base_is_and_trains_the_factors_alone(form, base):
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    precision = base if base in half else "fp32"
    model = adapted(tiny_model("llama"), "llama", trainable=FORMS[form], base=base, precision=precision)
    trained = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"lora_a", "lora_b", *(["lora_magnitude"] if form == "dora" else [])}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    held = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert held == {half.get(base, torch.float32)}
    for _, layer in frozen_layers(model):
        torch.testing.assert_close(merged_weight(layer, torch.float32), full_weight(layer, torch.float32))


def test_the_head_of_a_classifier_is_trained_in_full():
    model = adapted(tiny_model("bert", "sequence-classification"), "bert", trainable="lora", base="int8",
                    task="sequence-classification")
    whole = {name for name, p in model.named_parameters() if p.requires_grad and "lora" not in name}
    assert whole == {"classifier.weight", "classifier.bias"}


def test_named_parts_are_trained_and_the_rest_is_held_in_fewer_bits():
    model = adapted(tiny_model("llama"), "llama", base="nf4",
                    trainable={"name": "layers", "names": ["layers.1.mlp", "lm_head"]})
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[0] for name in trained} == {
        "lm_head", *(f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down"))}
    quantized = {name for name, layer in frozen_layers(model) if layer.quantized is not None}
    assert "model.layers.1.self_attn.q_proj" in quantized
    assert not quantized & {name.rpartition(".")[0] for name in trained}


@pytest.mark.parametrize(("trainable", "word"), [
    ({"name": "lora", "targets": ["q_prj"]}, "'q_prj' is no linear layer of .*did you mean 'q_proj'"),
    ({"name": "layers", "names": ["lm_haed"]}, "'lm_haed' is no part of .*did you mean 'lm_head'"),
])
def test_a_name_that_is_no_part_is_refused_with_the_nearest(trainable, word):
    with pytest.raises(Refused, match=word):
        adapted(tiny_model("llama"), "llama", trainable=trainable)


def test_targets_are_layers_by_the_end_of_their_names():
    targets = ["q_proj", "layers.1.mlp.up_proj"]
    model = adapted(tiny_model("llama"), "llama", trainable={"name": "lora", "targets": targets})
    found = {name for name, layer in frozen_layers(model) if layer.added is not None}
    assert found == {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}

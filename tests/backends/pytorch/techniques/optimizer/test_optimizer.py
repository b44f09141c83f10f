from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses import FakeTensorMode
from torchao.optim import subclass_4bit, subclass_8bit

from tests.backends.pytorch.techniques.optimizer.optimizer_cases import CASES, Case, Tiny, tiny, train
from tests.plain import CPU
from tightfit.backends.pytorch.techniques.optimizer.apply import embedding_parameters, parameter_groups
from tightfit.backends.pytorch.techniques.optimizer.state import set_learning_rate, state_tensors
from tightfit.errors import ModelError
from tightfit.recipe import Recipe
from tightfit.techniques.optimizer import Adafactor, AdamW, AdamW4bit, AdamW8bit, Lion, Sgd
from tightfit.techniques.precision import Bf16Pure, Fp32

FP32_CASES = [case for case in CASES if isinstance(case.precision, Fp32)]


def group_names(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the parameters that decay, and of those that do not."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    decay, keep = ([names[parameter] for parameter in group["params"]] for group in groups)
    return decay, keep


SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=8, **SMALL)),
        ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight",
         "transformer.h.0.attn.c_proj.weight", "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_proj.weight"],
    ),
    "bert": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(intermediate_size=8, **SMALL)),
        ["bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight",
         "bert.embeddings.token_type_embeddings.weight", *(
             f"bert.encoder.layer.0.{part}.weight" for part in (
                 "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
                 "intermediate.dense", "output.dense")),
         "cls.predictions.transform.dense.weight"],
    ),
    "llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=8, **SMALL)),
        ["model.embed_tokens.weight", *(
            f"model.layers.0.{part}.weight" for part in (
                "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")), "lm_head.weight"],
    ),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
        ),
        ["shared.weight", *(f"encoder.block.0.layer.0.SelfAttention.{part}.weight" for part in "qkvo"),
         *(f"encoder.block.0.layer.1.DenseReluDense.{part}.weight" for part in ("wi", "wo")),
         *(f"decoder.block.0.layer.0.SelfAttention.{part}.weight" for part in "qkvo"),
         *(f"decoder.block.0.layer.1.EncDecAttention.{part}.weight" for part in ("q", "k", "v", "o")),
         *(f"decoder.block.0.layer.2.DenseReluDense.{part}.weight" for part in ("wi", "wo"))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_matrices_decay_and_biases_and_norms_do_not(name: str) -> None:
    make, expected = MODELS[name]
    model = make()
    decay, keep = group_names(model)
    assert decay == expected
    assert sorted(decay + keep) == sorted(name for name, _ in model.named_parameters())
    assert group_names(make()) == (decay, keep)


class GridNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 2))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2)
        self.out = nn.Linear(2, 4)
        self.out.weight = self.words.weight
        self.normalize = GridNorm()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(2, 2))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(2, 2))
        self.gain = nn.Parameter(torch.zeros(()))


def test_grouping_of_a_model_of_ones_own() -> None:
    kept = ["bias", "gate_up_proj_bias", "gain", "out.bias", "normalize.scale"]
    assert group_names(Custom()) == (["words.weight"], kept)


def test_a_group_with_nothing_in_it_is_left_out() -> None:
    (group,) = parameter_groups(nn.Linear(2, 2, bias=False), 0.1)
    assert group["weight_decay"] == 0.1


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ModelError, match="no parameter that requires a gradient"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.1)


def test_a_table_with_sparse_gradients_is_an_error() -> None:
    model = nn.Sequential(nn.Embedding(8, 2, sparse=True), nn.Linear(2, 8))
    with pytest.raises(ModelError, match=r"the gradient of its module '0' is sparse, .*; write sparse=False there"):
        parameter_groups(model, 0.1)
    model[0].requires_grad_(False)
    assert parameter_groups(model, 0.1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_learns(case: Case) -> None:
    model = tiny()
    losses = train(model, case.optimizer(model), range(30))
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_bytes_are_those_declared(case: Case) -> None:
    model = nn.Sequential(nn.Embedding(8, 512), nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    optimizer = case.optimizer(model)
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    tensors, _ = state_tensors(optimizer, model)
    sizes = {prefix: sum(t.nbytes for name, t in tensors.items() if name.startswith(prefix)) for prefix in "012"}
    declared = case.technique.bytes_beside(case.precision.weight_rounding)
    assert (sizes["1"] + sizes["2"]) / (2 * 512 * 512) == pytest.approx(declared, rel=0.15, abs=0.05)
    if isinstance(case.technique, AdamW8bit | AdamW4bit):
        assert sizes["0"] == 8 * 8 * 512 + 4


@pytest.mark.parametrize("case", [case for case in CASES if case.technique.name != "adafactor"], ids=str)
def test_steps_on_fake_tensors(case: Case) -> None:
    """As planning does; Adafactor reads the norms of its weights, which fake tensors have not."""
    for module in (subclass_4bit, subclass_8bit):  # as in a process that has made no real optimizer yet
        module.get_qmap_signed.cache_clear()
        module.get_qmap_unsigned.cache_clear()
    with FakeTensorMode():
        model = Tiny()
        optimizer = case.optimizer(model)
        for _ in range(2):
            model(torch.zeros(4, dtype=torch.long)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_tied_output_layer_keeps_32_bit_states() -> None:
    model = MODELS["gpt2"][0]()
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert [names[p] for p in embedding_parameters(model)] == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert model.lm_head.weight in embedding_parameters(model)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95)])
def test_adamw_implementations_agree(betas: tuple[float, float]) -> None:
    ends = []
    for implementation in ("loop", "foreach", "fused", "auto"):
        model = tiny()
        optimizer = Case(AdamW(implementation=implementation, betas=betas, weight_decay=0.1), Fp32()).optimizer(model)
        torch.manual_seed(1)
        for _ in range(10):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=1e-6)


def test_adamw_knobs_reach_the_library() -> None:
    technique = AdamW(implementation="foreach", betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    optimizer = Case(technique, Fp32()).optimizer(tiny())
    assert isinstance(optimizer, torch.optim.AdamW)
    decay, keep = optimizer.param_groups
    assert (decay["betas"], decay["eps"], decay["lr"]) == ((0.8, 0.95), 1e-6, 3e-3)
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.3, 0.0)
    assert (decay["foreach"], decay["fused"]) == (True, False)


@pytest.mark.parametrize("case", FP32_CASES, ids=str)
def test_weight_decay_reaches_matrices_alone(case: Case) -> None:
    model = tiny()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = case.optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    factor = 1 - case.learning_rate * case.technique.weight_decay  # type: ignore[attr-defined]
    for name, parameter in model.named_parameters():
        decays = parameter.ndim == 2
        torch.testing.assert_close(parameter.detach(), before[name] * (factor if decays else 1.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", FP32_CASES, ids=str)
def test_learning_rate_takes_effect_at_the_next_step(case: Case) -> None:
    model = tiny()
    optimizer = case.optimizer(model)

    def moved(rate: float) -> float:
        before = [p.detach().clone() for p in model.parameters()]
        set_learning_rate(optimizer, rate)
        train(model, optimizer, range(3, 4))
        return max((p - b).abs().max().item() for p, b in zip(model.parameters(), before, strict=True))

    train(model, optimizer, range(3))
    small, large = moved(1e-5), moved(1e-3)
    assert small > 0
    assert large > 30 * small
    assert moved(0.0) == 0


def test_adafactor_says_that_its_learning_rate_is_relative() -> None:
    usual, small = Recipe(learning_rate=1e-2), Recipe(learning_rate=1e-3)
    assert not Adafactor().notes(usual, CPU)
    (note,) = Adafactor().notes(small, CPU)
    assert "relative" in note
    assert "0.01 is usual, and learning_rate is 0.001" in note
    assert not Adafactor(scale_parameter=False).notes(small, CPU)


def test_adafactor_of_the_trainer_takes_the_steps_that_transformers_does() -> None:
    ours, theirs = tiny(), tiny()
    theirs.load_state_dict(ours.state_dict())
    groups = parameter_groups(theirs, 0.1)
    train(ours, Case(Adafactor(weight_decay=0.1, scale_parameter=False), Fp32(), rate=1e-3).optimizer(ours), range(5))
    train(theirs, transformers.Adafactor(groups, lr=1e-3, scale_parameter=False, relative_step=False), range(5))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_adafactor_follows_small_gradients_of_bf16_weights() -> None:
    """With torch.optim's own floor the step would shrink with the gradient."""
    moved = []
    for scale in (1.0, 1e-3):
        weight = nn.Linear(16, 16, bias=False)
        nn.init.constant_(weight.weight, 1.0)
        optimizer = Case(Adafactor(weight_decay=0.0), Bf16Pure(rounding="nearest")).optimizer(weight)
        weight.weight.grad = torch.full_like(weight.weight, scale)
        optimizer.step()
        moved.append((weight.weight.detach().float() - 1).abs().max().item())
    assert moved[0] == pytest.approx(moved[1], rel=0.1)
    assert moved[0] > 0.01


@pytest.mark.parametrize(
    ("technique", "rounding"),
    [(AdamW(weight_decay=0.0), "kahan"), (AdamW(weight_decay=0.0), "stochastic"), (Sgd(weight_decay=0.0), "kahan"),
     (Lion(weight_decay=0.0), "kahan"), (AdamW8bit(weight_decay=0.0), "stochastic"),
     (AdamW4bit(weight_decay=0.0), "stochastic")],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_rounding_keeps_updates_below_the_last_bit(technique: Any, rounding: Any) -> None:
    """Steps of about 2e-4 on weights of 1, whose last bit in bf16 is 8e-3: rounding to the nearest loses each."""
    ends = {}
    for precision in (Bf16Pure(rounding=rounding), Bf16Pure(rounding="nearest")):
        torch.manual_seed(0)
        linear = nn.Linear(64, 64, bias=False)
        nn.init.constant_(linear.weight, 1.0)
        optimizer = Case(technique, precision).optimizer(linear)
        set_learning_rate(optimizer, 2e-4)
        for _ in range(100):
            linear.weight.grad = torch.full_like(linear.weight, 0.1 if isinstance(technique, Sgd) else 1.0)
            optimizer.step()
        ends[precision.rounding] = linear.weight.detach().float().mean().item()
    assert ends["nearest"] == 1.0
    assert ends[rounding] == pytest.approx(0.98, abs=4e-3)

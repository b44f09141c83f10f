"""Muon: which parameters are its own, what step they take, and how bf16 ones take it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.backends.pytorch.techniques.optimizer.optimizer_cases import Case, tiny, train
from tests.backends.pytorch.techniques.optimizer.test_optimizer import MODELS
from tests.plain import CPU
from tightfit.backends.pytorch.blocks import find_stacks
from tightfit.backends.pytorch.techniques.optimizer.muon import matrices_of
from tightfit.devices import find_device
from tightfit.recipe import Recipe
from tightfit.techniques.backend import Jax
from tightfit.techniques.muon import Muon
from tightfit.techniques.precision import Bf16Pure, Fp16, Fp32, Precision

RATE = 1e-2
OUTSIDE = ("wte", "wpe", "embed", "shared", "lm_head", "cls.")
"""Parts of the names of matrices outside of blocks."""


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3))


def names_of_matrices(model: nn.Module) -> list[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    blocks = [block for stack in find_stacks(model) for block in stack]
    return [names[parameter] for parameter in matrices_of(model, blocks)]


@pytest.mark.parametrize("name", MODELS)
def test_the_matrices_of_blocks_are_its_own(name: str) -> None:
    make, decaying = MODELS[name]
    assert names_of_matrices(make()) == [each for each in decaying if not any(part in each for part in OUTSIDE)]


def test_experts_are_its_own_and_what_is_no_matrix_is_not() -> None:
    found = {name.rpartition("layers.0.")[2] for name in names_of_matrices(mixtral())}
    assert found >= {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.q_proj.weight"}
    assert names_of_matrices(nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(4, 4), nn.Embedding(4, 4))) == ["1.weight"]
    assert names_of_matrices(nn.Linear(4, 4, dtype=torch.complex64)) == []


def test_a_card_that_emulates_bf16_is_told() -> None:
    (note,) = Muon().notes(Recipe(precision=Fp16()), find_device("t4"))
    assert "T4 computes bf16 in emulation only (compute capability 7.5, 8.0 is needed), slowly" in note
    assert not Muon().notes(Recipe(backend=Jax()), find_device("t4"))  # whose are of the weights' format
    assert not Muon().notes(Recipe(), find_device("rtx-4090")) + Muon().notes(Recipe(), CPU)


def stepped(
    weights: list[Tensor], precision: Precision, steps: int = 1, rate: float = RATE, **knobs: Any
) -> list[Tensor]:  # fmt: skip
    """Matrices after steps with random gradients."""
    model = nn.ParameterList([nn.Parameter(weight.clone()) for weight in weights])
    optimizer = Case(Muon(**knobs), precision, rate=rate).optimizer(model)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()
    return [parameter.detach() for parameter in model]


@pytest.mark.parametrize("shape", [(48, 48), (64, 24), (24, 64)])
def test_a_step_moves_all_directions_alike_and_as_far_as_adamw(shape: tuple[int, int]) -> None:
    (moved,) = stepped([torch.zeros(shape)], Fp32(), weight_decay=0.0)
    sizes = torch.linalg.svdvals(moved) / (RATE * 0.2 * max(shape) ** 0.5)
    assert 0.5 < sizes.min() < sizes.max() < 1.3
    assert moved.square().mean().sqrt().item() == pytest.approx(0.2 * RATE, rel=0.2)


def test_matrices_and_the_rest_take_torchs_own_steps() -> None:
    ours, theirs = tiny(), tiny()
    knobs: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.8}
    optimizer = Case(Muon(betas=(0.8, 0.9), **knobs), Fp32(), rate=RATE).optimizer(ours)
    others = [{"params": [theirs.embedding.weight], "weight_decay": 0.1},
              {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    muon = torch.optim.Muon([theirs.hidden.weight, theirs.out.weight], lr=RATE, adjust_lr_fn="match_rms_adamw", **knobs)
    adamw = torch.optim.AdamW(others, lr=RATE, betas=(0.8, 0.9), fused=True)
    for step in range(5):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.manual_seed(step)
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for each in (optimizer, muon, adamw):
            each.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("precision", [Fp32(), Bf16Pure(), Bf16Pure(rounding="nearest")], ids=str)
def test_each_of_a_layers_experts_takes_the_step_of_a_matrix(precision: Precision) -> None:
    model = mixtral().to(torch.bfloat16 if isinstance(precision, Bf16Pure) else torch.float32)
    name, stack = next((n, p) for n, p in model.named_parameters() if n.endswith("experts.down_proj"))
    alone = nn.ParameterList([nn.Parameter(expert.detach().clone()) for expert in stack])
    optimizers = [Case(Muon(), precision, rate=RATE).optimizer(each) for each in (model, alone)]
    for step in range(3):
        torch.manual_seed(step)
        stack.grad = torch.randn_like(stack)
        for expert, gradient in zip(alone, stack.grad, strict=True):
            expert.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(model.get_parameter(name), torch.stack([*alone]), rtol=1e-2, atol=RATE / 50)
    assert not torch.equal(alone[0], alone[1])


def test_rounding_keeps_steps_below_the_last_bit() -> None:
    """Steps of about 2e-4 on weights of about 1, whose last bit in bf16 is 8e-3."""
    start = [torch.ones(64, 64), torch.ones(64, 32)]

    def distance(precision: Precision) -> float:
        exact = stepped(start, Fp32(), 100, momentum=0.0, weight_decay=0.05, rate=1e-3)
        found = stepped(start, precision, 100, momentum=0.0, weight_decay=0.05, rate=1e-3)
        off, moved = (torch.cat([(a.float() - b).flatten() for a, b in zip(one, other, strict=True)]).mean().abs()
                      for one, other in ((found, exact), (exact, start)))
        return (off / moved).item()

    assert distance(Bf16Pure()) < 0.1
    assert distance(Bf16Pure(rounding="stochastic")) < 0.1
    assert distance(Bf16Pure(rounding="nearest")) > 0.5


@pytest.mark.parametrize("precision", [Fp32(), Bf16Pure()], ids=str)
def test_parameters_that_are_added_later_are_the_rests(precision: Precision) -> None:
    model = tiny().to(torch.bfloat16 if isinstance(precision, Bf16Pure) else torch.float32)
    optimizer = Case(Muon(), precision, rate=RATE).optimizer(model)
    added = nn.Parameter(torch.ones_like(model.hidden.weight))
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones_like(added)
    optimizer.step()
    torch.testing.assert_close(added.float(), torch.full_like(added, 1 - RATE).float(), rtol=0, atol=RATE / 10)


def test_a_copy_goes_on_as_the_original() -> None:
    model = tiny()
    optimizer = Case(Muon(), Fp32()).optimizer(model)
    train(model, optimizer, range(3))
    others = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    losses = train(model, optimizer, range(3, 6))
    for copied, its_optimizer in others:
        assert train(copied, its_optimizer, range(3, 6)) == losses

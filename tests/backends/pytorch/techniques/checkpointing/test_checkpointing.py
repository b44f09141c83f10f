"""Every checkpointing variant: the same gradients to the bit, less kept, and no more recomputed than it says."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends.pytorch.techniques.checkpointing.checkpointing_cases import (
    LAYERS,
    Measured,
    assert_equal,
    build,
    gradients,
    loss,
    make,
    measure,
    step,
)
from tightfit.backends.pytorch.techniques.checkpointing.apply import POLICIES, equal_runs
from tightfit.errors import ModelError
from tightfit.techniques import SLOTS
from tightfit.techniques.checkpointing import (
    AttentionOnly,
    Checkpointing,
    EveryBlock,
    EveryNth,
    MemoryBudget,
    MlpOnly,
    NoCheckpointing,
    Segments,
    Selective,
)

NAMES = ("plain", "plain-by-keyword", "gpt2", "bert", "llama", "opt", "t5", "vit")
RUNGS = [
    *(rung for kind in SLOTS["checkpointing"] if kind is not MemoryBudget for rung in kind.representative_settings()),
    Segments(count=1), Segments(count=3), Segments(count=99), EveryNth(n=1),
]  # fmt: skip
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


@cache
def plain_gradients(name: str) -> dict[str, Tensor]:
    return step(make(name), name)


@cache
def measured(technique: Checkpointing, name: str = "gpt2", **changes: Any) -> Measured:
    return measure(build(make(name, **changes), technique).model, name)


@pytest.mark.parametrize("technique", RUNGS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_names_are_those_without(name: str, technique: Checkpointing) -> None:
    model = make(name)
    names = list(model.state_dict())
    model = build(model, technique).model
    assert_equal(step(model, name), plain_gradients(name))
    assert list(model.state_dict()) == names


def test_less_is_kept() -> None:
    none = measured(NoCheckpointing()).kept
    every, half = measured(EveryBlock()).kept, measured(EveryNth(n=2)).kept
    assert measured(Segments(count=1)).kept < measured(Segments()).kept < every < none / 4
    # Half of the blocks save half of the bytes.
    assert half - every == pytest.approx((none - every) / 2, rel=0.02)
    assert every < measured(MlpOnly()).kept < none
    assert every < measured(AttentionOnly()).kept < none


def test_selective_keeps_what_it_names() -> None:
    none, every = measured(NoCheckpointing()).kept, measured(EveryBlock()).kept
    some, most = measured(Selective(keep="every-other-matmul")).kept, measured(Selective()).kept
    assert every < some < most < none


def matmuls(found: Measured) -> int:
    return sum(found.ops[f"aten::{name}"] for name in ("mm", "addmm", "bmm", "baddbmm"))


@pytest.mark.parametrize(
    ("technique", "each"),
    [
        # GPT-2's block: four linear layers, and two products inside attention (dropout forbids the fused kernel).
        (EveryBlock(), 6), (Segments(), 6), (EveryNth(n=2), 3), (MlpOnly(), 2), (AttentionOnly(), 4),
        (Selective(), 0), (Selective(keep="every-other-matmul"), 3), (Selective(keep="attention"), 6),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_recomputed(technique: Checkpointing, each: int) -> None:
    """`each`: matrix products computed a second time, per block."""
    assert matmuls(measured(technique)) - matmuls(measured(NoCheckpointing())) == each * LAYERS


@pytest.mark.parametrize(
    ("technique", "calls"), [(EveryBlock(), 2), (Selective(), 1), (Selective(keep="attention"), 1)], ids=str
)
def test_fused_attention_is_kept(technique: Checkpointing, calls: int) -> None:
    found = measured(technique, "llama", attention_dropout=0.0)
    assert found.ops[FLASH] == calls * LAYERS


@pytest.mark.parametrize("keep", POLICIES)
def test_attention_that_drops_is_not_kept(keep: str) -> None:
    """Left out of the recomputation, it would shift the random numbers of every later dropout."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    context = torch.utils.checkpoint.SelectiveCheckpointContext(is_recompute=False)
    policy, tensor = POLICIES[keep](), torch.zeros(1, 1, 2, 2)
    kinds = torch.utils.checkpoint.CheckpointPolicy
    assert policy(context, attend, tensor, tensor, tensor) is kinds.MUST_SAVE
    assert policy(context, attend, tensor, tensor, tensor, 0.0) is kinds.MUST_SAVE
    assert policy(context, attend, tensor, tensor, tensor, 0.1) is kinds.PREFER_RECOMPUTE
    assert policy(context, attend, tensor, tensor, tensor, dropout_p=0.1) is kinds.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    "technique", [EveryBlock(), Segments(), MlpOnly(), *Selective.representative_settings()], ids=str)
def test_under_autocast(technique: Checkpointing) -> None:
    def autocast_step(technique: Checkpointing) -> dict[str, Tensor]:
        model = build(make("bert"), technique).model
        with torch.autocast("cpu", torch.bfloat16):
            total = loss(model, "bert")
        total.backward()
        return gradients(model)

    expected = autocast_step(NoCheckpointing())
    assert_equal(autocast_step(technique), expected)
    with pytest.raises(AssertionError):  # autocast did something
        assert_equal(plain_gradients("bert"), expected)


@pytest.mark.parametrize("technique", [EveryBlock(), Segments(), MlpOnly(), Selective()], ids=str)
def test_two_forwards_before_two_backwards(technique: Checkpointing) -> None:
    def both(technique: Checkpointing) -> dict[str, Tensor]:
        model = build(make("t5"), technique).model
        losses = [loss(model, "t5", seed) for seed in (1, 2)]
        for total in losses:
            total.backward()
        return gradients(model)

    assert_equal(both(technique), both(NoCheckpointing()))


@pytest.mark.parametrize("technique", [EveryBlock(), Segments(), MlpOnly()], ids=str)
def test_a_graph_kept_for_a_second_backward(technique: Checkpointing) -> None:
    model = build(make("opt"), technique).model
    total = loss(model, "opt")
    total.backward(retain_graph=True)
    once = gradients(model)
    total.backward()
    assert_equal(gradients(model), once)
    assert_equal(once, plain_gradients("opt"))


def test_parts_that_cannot_be_found_are_an_error() -> None:
    model = make("plain")
    for block in model.get_submodule("blocks").children():
        for name in ("attention", "mlp"):
            block._modules[f"unknown_{name}"] = block._modules.pop(name)
    for technique, part in ((MlpOnly(), "feed-forward"), (AttentionOnly(), "attention")):
        with pytest.raises(ModelError, match=rf"{part} part of Block .* write checkpointing=every-block"):
            build(model, technique)


def test_a_model_without_blocks_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"Linear has no repeated blocks .* write checkpointing=none"):
        build(torch.nn.Linear(2, 2), EveryBlock())


@pytest.mark.parametrize(("length", "count"), [(1, 1), (4, 2), (5, 2), (7, 3), (12, 3), (5, 5)])
def test_runs_are_as_equal_as_can_be(length: int, count: int) -> None:
    stack = [torch.nn.Identity() for _ in range(length)]
    runs = list(equal_runs(stack, count))
    assert [module for run in runs for module in run] == stack
    sizes = [len(run) for run in runs]
    assert len(runs) == count
    assert max(sizes) - min(sizes) <= 1

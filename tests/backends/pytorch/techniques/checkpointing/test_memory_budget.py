"""The compiler's memory budget: less is saved, and dropout's gradients stay right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.backends.pytorch.techniques.checkpointing.checkpointing_cases import (
    assert_equal,
    build,
    make,
    saved_bytes,
    step,
)
from tightfit.backends.pytorch.blocks import find_stacks
from tightfit.techniques.checkpointing import MemoryBudget

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def compiled(budget: float) -> tuple[dict[str, Tensor], int]:
    """The gradients of GPT-2 with compiled blocks, and the bytes its forward pass saves."""
    torch._dynamo.reset()
    built = build(make("gpt2", n_layer=1), MemoryBudget(budget=budget))
    with built.process_settings():
        for block in find_stacks(built.model)[0]:
            block.compile(backend="aot_eager")
        return step(built.model, "gpt2"), saved_bytes(built.model, "gpt2")


def test_less_is_saved_and_gradients_stay() -> None:
    expected = step(make("gpt2", n_layer=1), "gpt2")
    sizes = []
    for budget in (1.0, 0.5, 0.0):
        found, size = compiled(budget)
        assert_equal(found, expected)
        sizes.append(size)
    assert sizes[2] < 0.7 * sizes[0]
    assert sizes[2] < sizes[1] < sizes[0]


def test_settings_are_put_back() -> None:
    before = torch._functorch.config.activation_memory_budget
    built = build(make("gpt2", n_layer=1), MemoryBudget(budget=0.25))
    for _ in range(2):
        with built.process_settings():
            assert torch._functorch.config.activation_memory_budget == 0.25
        assert torch._functorch.config.activation_memory_budget == before
        assert torch._functorch.config.joint_custom_pass is None

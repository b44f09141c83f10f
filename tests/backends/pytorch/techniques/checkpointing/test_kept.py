"""Kept results that the model changes in place inside a region: they are recomputed. Behind it: `test_failures`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.backends.pytorch.techniques.checkpointing.checkpointing_cases import (
    LAYERS,
    Plain,
    assert_equal,
    build,
    measure,
    step,
)
from tightfit.techniques.checkpointing import Selective


def _half_of_it(h: Tensor) -> Tensor:
    h.transpose(0, 1)[:8].mul_(0.5)
    return h


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda h: h * 0.5,
    "whole": lambda h: h.mul_(0.5),
    "through a view": _half_of_it,
    "by a copy": lambda h: h.copy_(h.detach().cos() + h * 0.0),
    "twice": lambda h: h.mul_(0.5).add_(1.0),
}


class Changed(nn.Module):
    """A block with a dropout that changes what its first product is."""

    def __init__(self, bias: bool, change: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=bias), nn.Linear(12, 8, bias=bias)
        self.change = CHANGES[change]

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        h = self.change(self.up(x))
        output: Tensor = x + nn.functional.dropout(self.down(h.relu()), 0.1)
        return output


def model(bias: bool, change: str) -> nn.Module:
    torch.manual_seed(0)
    made = Plain()
    made.blocks = nn.ModuleList(Changed(bias, change) for _ in range(LAYERS))
    return made.train()


@pytest.mark.parametrize("keep", ["matmul-and-attention", "every-other-matmul", "attention"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_are_those_without(change: str, bias: bool, keep: str) -> None:
    technique = Selective(keep=keep)
    assert_equal(step(build(model(bias, change), technique).model, "plain"), step(model(bias, change), "plain"))


def test_what_is_changed_alone_is_recomputed() -> None:
    left = measure(build(model(False, "none"), Selective()).model, "plain")
    changed = measure(build(model(False, "whole"), Selective()).model, "plain")
    assert changed.ops["aten::mm"] == left.ops["aten::mm"] + LAYERS
    assert changed.kept < left.kept
    assert left.ops["aten::mm"] == measure(model(False, "none"), "plain").ops["aten::mm"]

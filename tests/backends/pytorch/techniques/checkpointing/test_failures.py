"""What torch's checkpoint finds wrong, told in one sentence with what to write instead, in plans and in steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.benchmark_modules import benchmark
from tests.plain import CPU
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.simulate.predict import predict
from tightfit.errors import ModelError
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe

FIELDS = {"data": "dummy", "vocab_size": 16, "seq_len": 8, "batch_size": 2, "micro_batch_size": 2, "device": "cpu",
          "compile": "off", "accumulation": "loop", "offload": "none", "update": "after-backward", "loss": "plain"}


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=how == "changed with a bias"), nn.Linear(8, 8)
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        again = self.calls > 1
        product = self.up(x)
        if self.how == "other ops" and again:
            x = x.cos()
        if self.how == "other tensors" and again:
            product = product[:1]
        return x + self.down(product.sin()).sin(), product


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x, product = block(x)
            if self.how.startswith("changed"):
                product.mul_(0.5)
        logits: Tensor = self.head(x)
        return logits


CHANGED = ("selective", "it changes in place, after a block has ended, a matrix product of the block's that "
                        "checkpointing=selective keeps; write checkpointing=every-block")
TOLD: dict[str, tuple[Any, str]] = {
    "changed": CHANGED, "changed with a bias": CHANGED,
    "other ops": ("selective", "checkpointing=selective runs other ops in the backward pass than the forward pass did; "
                               "write checkpointing=every-block"),
    "other tensors": ("every-block", "checkpointing computes other tensors in the backward pass than the forward pass "
                                     "did; write checkpointing=none"),
}


@pytest.fixture(params=TOLD)
def how(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def recipe_for(how: str) -> Recipe:
    return resolve(Recipe.from_dict({**FIELDS, "checkpointing": TOLD[how][0]}), CPU)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="earlier ones see fewer of these")
def test_in_a_plan(how: str) -> None:
    with pytest.raises(ModelError, match=f"^model: Model cannot be trained so: {TOLD[how][1]}$"):
        predict(recipe_for(how), CPU, Model(how))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="earlier ones see fewer of these")
def test_in_a_step(how: str) -> None:
    backend = PytorchBackend()
    build = backend.build(recipe_for(how), CPU, Model(how))
    step = backend.step(build)
    global_batch = benchmark("random_global_batches").random_global_batch(build.recipe, build.task, build.facts, 0)
    told = f"^model: Model failed in the backward pass of micro-batch 1 of 1: {TOLD[how][1]}$"
    with pytest.raises(ModelError, match=told):
        step(global_batch, 1e-3)

"""The update that planning declares for torchao's optimizers, beside what torch.compile makes of the real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.allocations import allocated
from tests.backends.pytorch.techniques.optimizer.optimizer_cases import NEEDS_COMPILER
from tightfit.backends import load_backend
from tightfit.devices import find_device
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe

SHAPE = (512, 512)


@pytest.mark.cold
@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_the_declared_update_asks_for_what_the_compiled_one_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tightfit.backends.pytorch.techniques.optimizer import quantized_adamw

    def optimizer(declared: bool) -> tuple[Any, nn.Parameter]:
        weight = nn.Parameter(torch.randn(SHAPE))
        block = {"AdamW8bit": 256, "AdamW4bit": 128}[name]
        groups = [{"params": [weight]}]
        made = getattr(quantized_adamw, name)(groups, in_32_bits=(), lr=1e-3, block_size=block, declared=declared)
        return made, weight

    def update(made: Any, weight: Tensor, compiled: bool) -> int:
        weight.grad = torch.randn(SHAPE)
        if compiled:
            monkeypatch.setattr(quantized_adamw, "single_param_adam", quantized_adamw._compiled_update())
        made.step()  # makes the states, and compiles
        return max(allocated(made.step))

    real = update(*optimizer(False), compiled=True)
    declared = update(*optimizer(True), compiled=False)
    assert declared >= 2 * 4 * SHAPE[0] * SHAPE[1]
    assert declared == pytest.approx(real, rel=0.01)


def test_a_plan_for_a_gpu_counts_a_kernel_and_not_its_parts() -> None:
    backend, device = load_backend("pytorch"), find_device("a100-40gb")
    recipe = Recipe.from_dict({"model": "gpt2", "model_overrides": {"n_layer": 2}, "batch_size": 1, "seq_len": 64})
    ops = {}
    for name in ("adamw-8bit", "adamw"):
        trace = backend.predict(resolve(recipe.override(optimizer=name), device), device)
        last = trace.span("step 2")
        ops[name] = sum(last.start <= op.tick < last.stop for op in trace.ops)
    parameters = 2 * 12 + 4
    assert ops["adamw-8bit"] - ops["adamw"] < 10 * parameters

"""AdamW by Apex: handed over as torch's is, resumed with its count of steps, and refused by name where it cannot serve.

Apex's kernels need a GPU. In their place stands what its documentation says of them: AdamW over all tensors, with the
count of steps in a parameter group.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.backends.pytorch.techniques.optimizer.optimizer_cases import Case, load_state, tiny, train
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.techniques.optimizer.state import state_tensors
from tightfit.devices import find_device
from tightfit.errors import Refused
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.techniques.optimizer import AdamW
from tightfit.techniques.precision import Fp32

APEX, TORCH = Case(AdamW(implementation="apex"), Fp32()), Case(AdamW(implementation="loop"), Fp32())
CARD = find_device("rtx-3090")


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, groups: Any, lr: float, betas: Any, eps: float, adam_w_mode: bool, weight_decay: float = 0.0):
        assert adam_w_mode
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                root = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt() + group["eps"]
                p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - first ** group["step"]))


@pytest.fixture
def apex(monkeypatch):
    module: Any = ModuleType("apex.optimizers")
    module.FusedAdam = FusedAdam
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", module)


@pytest.mark.usefixtures("apex")
def test_it_learns_what_torchs_learns():
    found = []
    for case in (APEX, TORCH):
        model = tiny()
        found.append(train(model, case.optimizer(model), range(6)))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.usefixtures("apex")
def test_it_goes_on_from_a_checkpoint_with_its_count_of_steps():
    model = tiny()
    optimizer = APEX.optimizer(model)
    train(model, optimizer, range(4))
    weights, (tensors, meta) = copy.deepcopy(model.state_dict()), copy.deepcopy(state_tensors(optimizer, model))
    other = tiny()
    other_optimizer = APEX.optimizer(other)
    load_state(other_optimizer, other, tensors, meta)
    other.load_state_dict(weights)
    assert train(other, other_optimizer, range(4, 7)) == train(model, optimizer, range(4, 7))


def test_where_it_is_not_installed_a_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex.optimizers", None)
    with pytest.raises(Refused, match=r"NVIDIA's Apex.*optimizer\.implementation=fused"):
        APEX.optimizer(tiny())


@pytest.mark.parametrize(("changes", "device", "said"), [
    ({}, replace(CARD, kind="cpu"), "CUDA devices alone"),
    ({"precision": {"name": "bf16-pure", "rounding": "nearest"}}, CARD, "fp32 states"),
    ({"parallel": "fsdp"}, CARD, "no parts of weights"), ({"parallel": "zero"}, CARD, "no parts of weights"),
    ({"offload": "host"}, CARD, "on the device"), ({"update": "in-backward"}, CARD, "on the device"),
])  # fmt: skip
def test_what_it_cannot_serve_is_refused_by_name(changes, device, said):
    recipe = Recipe.from_dict({"optimizer": {"name": "adamw", "implementation": "apex"}, **changes})
    assert any(said in reason and "implementation=fused" in reason for reason in recipe.refusals(device))


def test_a_plan_takes_torchs_kernel_in_its_place(tiny):
    values = {**tiny, "device": "auto", "precision": "fp32"}
    traces = []
    for implementation in ("apex", "fused"):
        recipe = Recipe.from_dict({**values, "optimizer": {"name": "adamw", "implementation": implementation}})
        traces.append(PytorchBackend().predict(resolve(recipe, CARD), CARD))
    assert traces[0].peak() == traces[1].peak()
    assert any("Apex's kernel is planned" in note for note in traces[0].notes)

"""`deterministic: true`: held while steps run and given back, and refused for an op that has no such form."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from tests.built import built
from tests.own_models import Scores
from tests.training.runs import final_weights
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.devices import find_device
from tightfit.errors import Refused
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.training.trainer import Trainer


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


class Putting(Scores):
    """A model whose forward pass runs an op of which torch has one form, and no deterministic one."""

    def __init__(self) -> None:
        super().__init__(128)
        self.seen: list[bool] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        self.seen.append(torch.are_deterministic_algorithms_enabled())
        places = torch.zeros(1, dtype=torch.long)
        return super().forward(input_ids) + torch.zeros(1).put_(places, torch.zeros(1))


def test_it_holds_while_steps_run_and_no_longer(tiny):
    build = built({**tiny, "deterministic": True})
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    for _ in range(2):
        assert not torch.are_deterministic_algorithms_enabled()
        with build.process_settings():
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_a_run_learns_what_it_learns_without(tiny, tmp_path):
    for name, asked in (("with", True), ("without", False)):
        Trainer(recipe={**tiny, "deterministic": asked, "output_dir": str(tmp_path / name)}).train()
    one, other = final_weights(tmp_path / "with"), final_weights(tmp_path / "without")
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_an_op_without_such_a_form_is_named(tiny):
    values = {name: value for name, value in tiny.items() if name not in ("model", "model_overrides")}
    Trainer(Putting(), {**values, "output_dir": f"{tiny['output_dir']}-free"}).train()
    with pytest.raises(Refused, match=r"deterministic: .*put_.*write deterministic=false"):
        Trainer(Putting(), {**values, "deterministic": True}).train()
    assert not torch.are_deterministic_algorithms_enabled()


def planned(values: dict[str, object], asked: bool) -> set[str]:
    """The ops of a step on an H100."""
    card = find_device("h100-sxm")
    recipe = Recipe.from_dict({**values, "device": "auto", "precision": "bf16", "attention": "sdpa",
                               "deterministic": asked})  # fmt: skip
    return {op.name for op in PytorchBackend().predict(resolve(recipe, card), card).ops}


def test_a_plan_has_the_attention_kernel_that_has_such_a_form(tiny):
    """An H100 prefers cuDNN's, whose backward pass sums in no fixed order."""
    heads = {**tiny["model_overrides"], "n_embd": 128}
    ops = {asked: planned({**tiny, "model_overrides": heads}, asked) for asked in (False, True)}
    assert any("cudnn" in name for name in ops[False])
    assert not any("cudnn" in name for name in ops[True])
    assert any("flash" in name for name in ops[True])

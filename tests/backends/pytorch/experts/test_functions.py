"""Our experts function: transformers' own arithmetic in another order, in autocast's format, without the copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.backends.pytorch.experts.experts_cases import CONFIGS, WHOLE, moe_model, moe_step, ragged
from tightfit.backends.pytorch.experts.active_parameters import experts_of
from tightfit.backends.pytorch.experts.functions import OUR_GROUPED_MM, use_ours
from tightfit.recipe import Recipe

IDS = torch.arange(2 * 20).reshape(2, 20) % 90 + 3


class Formats(TorchDispatchMode):
    """Formats of the operands of grouped products."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "grouped_mm" in str(func):
            self.found |= {arg.dtype for arg in args[:2]}
        return func(*args, **(kwargs or {}))


def learned(model):
    """Logits and gradients of a pass."""
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.square().sum().backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("kind", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", CONFIGS)
def test_results_and_gradients_are_transformers_own(name, kind):
    model = moe_model(name)
    ours = copy.deepcopy(model)
    model.set_experts_implementation(kind)
    use_ours(ours, Recipe())
    assert ours.config._experts_implementation == OUR_GROUPED_MM

    wanted, found = learned(model), learned(ours)

    for key, value in wanted.items():
        assert (found[key] - value).abs().max() <= 2e-5 * value.abs().max(), key


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "bf16-pure"])
def test_experts_are_multiplied_in_the_recipes_format(precision):
    step = moe_step("gpt-oss", precision=precision)
    with Formats() as formats:
        step(ragged(WHOLE), 1e-3).read()

    assert formats.found == {{"fp16": torch.float16, "fp32": torch.float32}.get(precision, torch.bfloat16)}


@pytest.mark.parametrize(("kind", "told"), [
    ("grouped_mm", "grouped_mm"), ("batched_mm", "batched_mm"), ("eager", "eager"),
])
def test_the_function_that_ran_is_told(kind, told):
    model = moe_model("olmoe")
    model.set_experts_implementation(kind)
    step = moe_step("olmoe", model)
    step(ragged(WHOLE), 1e-3)

    assert step.experts_functions == (told,)


def test_experts_whose_rows_are_not_aligned_go_one_by_one():
    model = moe_model("mixtral", intermediate_size=49)
    step = moe_step("mixtral", model)
    step(ragged(WHOLE), 1e-3)

    assert step.experts_functions == ("a loop over experts",)


def test_experts_are_found_by_their_shape():
    model = moe_model("every other layer")
    assert [type(experts).__name__ for experts in experts_of(model)] == ["Qwen3MoeExperts"] * 2


def test_an_expert_without_tokens_has_no_gradient():
    model = moe_model("olmoe")
    use_ours(model, Recipe())
    (experts, *_) = experts_of(model)
    hidden, chosen = torch.randn(5, 32), torch.tensor([[0, 2]] * 5)
    experts(hidden, chosen, torch.full((5, 2), 0.5)).sum().backward()

    used = experts.down_proj.grad.abs().sum((1, 2)) > 0
    assert used.tolist() == [True, False, True, False, False, False]

"""State dicts of a model whose updates wait and whose weights lie in host memory."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backends.pytorch.techniques.by_block.streaming_cases import (
    BY_BLOCK,
    EVERYTHING,
    HOST,
    STATES,
    STREAMED,
    global_batches,
    run,
    same,
    step_of,
    weights,
)
from tightfit.backends.pytorch.step import Step

KINDS = {"both": BY_BLOCK, "host": HOST, "everything": EVERYTHING,
         "states with forward": {**STATES, "update": "with-forward"}}


def taken(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_between_steps_they_hold_the_updated_weights(fields):
    plain, streamed = step_of("llama"), step_of("llama", **fields)
    for number, batch in enumerate(global_batches("llama")):
        assert streamed(batch, 3e-3 / (number + 1)).read() == plain(batch, 3e-3 / (number + 1)).read()
        assert not equal(weights(streamed), weights(plain))  # the parameters themselves wait
        assert equal(taken(streamed.build.model), taken(plain.build.model))
        assert equal(weights(streamed), weights(plain))


@pytest.mark.parametrize("kind", ["with-forward", "host", "everything"])
def test_those_taken_within_a_step_change_nothing(kind, monkeypatch):
    fields: dict[str, Any] = STREAMED[kind]
    plain, inner, asked = run("llama", **fields), Step.__init__, []

    def init(step: Step, *args: Any, **kwargs: Any) -> None:
        inner(step, *args, **kwargs)
        model = step.build.model
        parts = [model.get_submodule(f"model.{name}") for name in ("layers.1.mlp", "layers.2", "norm")]
        for part in parts:
            part.register_forward_hook(lambda *_: asked.append(len(model.state_dict())))
        for part in parts:
            part.register_full_backward_hook(lambda *_: asked.append(len(model.state_dict())))

    monkeypatch.setattr(Step, "__init__", init)
    assert same(plain, run("llama", **fields))
    assert asked


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_what_is_loaded_between_steps_is_trained_on(fields):
    found = []
    for step in step_of("llama"), step_of("llama", **fields):
        first, second, third = tuple(global_batches("llama", 3))
        step(first, 1e-2)
        kept = taken(step.build.model)
        step(second, 1e-2)
        step.build.model.load_state_dict(kept)
        found.append((step(third, 1e-2).read(), taken(step.build.model)))

    assert found[0][0] == found[1][0]
    assert equal(found[0][1], found[1][1])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
                         ids=["copied", "pickled"])
def test_a_copy_of_the_model_is_a_model_of_its_own(copied):
    step = step_of("llama", **HOST)
    first, second = tuple(global_batches("llama", 2))
    step(first, 1e-2)
    kept = taken(step.build.model)
    model = copied(step.build.model)
    step(second, 1e-2)

    assert equal(taken(model), kept)
    model.load_state_dict(kept)
    assert not equal(taken(step.build.model), kept)


@pytest.mark.parametrize("fields", [HOST, EVERYTHING, BY_BLOCK], ids=["host", "everything", "here"])
def test_a_closed_steps_model_is_an_ordinary_one(fields):
    plain, streamed = step_of("llama"), step_of("llama", **fields)
    batch = next(global_batches("llama"))
    for step in (plain, streamed):
        step(batch, 1e-3)
        step.close()
    model, ids = streamed.build.model, torch.arange(4, 12)[None]

    assert all(module._compiled_call_impl is None for module in model.modules())
    assert not model._state_dict_pre_hooks
    assert not model._load_state_dict_pre_hooks
    assert not model._load_state_dict_post_hooks
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    assert torch.equal(model(input_ids=ids).logits, plain.build.model(input_ids=ids).logits)
    model(input_ids=ids).logits.sum().backward()

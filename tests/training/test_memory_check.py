"""A step that this machine's memory cannot hold is said, or refused, before it begins."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.backends import load_backend
from tightfit.errors import Refused
from tightfit.models import read_config
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import steps_alone
from tightfit.profiling.measure import profile_recipe
from tightfit.recipe import Recipe
from tightfit.system import HostMemory
from tightfit.training import memory_check
from tightfit.training.memory_check import check_memory, rough_bytes
from tightfit.training.trainer import Trainer

GIB = 1 << 30


def has(monkeypatch: pytest.MonkeyPatch, total: float, available: float) -> None:
    memory = HostMemory(total=int(total), available=int(available))
    monkeypatch.setattr(memory_check, "host_memory", lambda: memory)


@pytest.fixture
def large() -> Recipe:
    return Recipe.from_dict({
        "model": "gpt2", "model_overrides": {"n_layer": 2, "n_embd": 128, "n_head": 4}, "data": "dummy", "seq_len": 128,
        "vocab_size": 512, "batch_size": 16, "micro_batch_size": 16, "device": "cpu"})  # fmt: skip


def checked(recipe: Recipe) -> list[str]:
    backend, said = load_backend(recipe.backend), list[str]()
    device = backend.device(recipe)
    check_memory(resolve(recipe, device), device, backend, read_config(recipe), said.append)
    return said


def peak_of(recipe: Recipe) -> int:
    backend = load_backend("pytorch")
    device = backend.device(recipe)
    return steps_alone(backend.predict(resolve(recipe, device), device)).peak()[1]


def test_a_step_is_weighed_against_what_is_free_and_what_there_is(
    large: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak = peak_of(large)
    has(monkeypatch, 2 * peak, 1.01 * peak)
    assert checked(large) == []
    has(monkeypatch, 2 * peak, 0.99 * peak)
    (said,) = checked(large)
    assert said.startswith("warning: a step is predicted to take ")
    assert "Write micro_batch_size=8 (the same global batch, more accumulation); or checkpointing=selective (" in said
    has(monkeypatch, 0.99 * peak, 0.98 * peak)
    with pytest.raises(Refused, match=r"the system would end the run\. Write micro_batch_size=8"):
        checked(large)


@pytest.mark.cold
def test_the_micro_batch_that_is_named_fits(large: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, four = (peak_of(large.override(micro_batch_size=micro)) for micro in (1, 2, 4))
    for total, free, told in ((four, four, 4), (four - 1, four - 1, 2), (four, two, 2), (two - 1, one, 1),
                              (four, one - 1, 4)):  # fmt: skip
        has(monkeypatch, total, free)
        with pytest.raises(Refused, match=rf"Write micro_batch_size={told} "):
            checked(large)
    has(monkeypatch, one - 1, one - 1)
    with pytest.raises(Refused, match=r"No micro-batch is small enough \(a single sample takes [\d.]+ MiB\): write "
                       r"checkpointing=selective \(.*\); or checkpointing=every-block \(.*\); or a smaller"):
        checked(large)
    with pytest.raises(Refused, match=r"No micro-batch is small enough: write checkpointing=selective"):
        checked(large.override(micro_batch_size=1))


def test_a_sequence_without_positions_is_refused_and_not_predicted(
    large: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, GIB, GIB)
    longer = large.override(seq_len=20_000)
    for run in (checked, profile_recipe):
        with pytest.raises(Refused, match=r"^seq_len: 20000 exceeds the model's 1024 positions"):
            run(longer)


def test_a_small_step_is_not_predicted(large: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 8 * GIB, 8 * GIB)
    monkeypatch.setattr(load_backend("pytorch").__class__, "predict", None)
    assert checked(large) == []


@pytest.mark.parametrize("values", [
    {}, {"attention": "eager"}, {"seq_len": 512}, {"model": "bert-base", "model_overrides": {}, "task": "masked-lm"},
    {"model": "t5-small", "model_overrides": {}, "task": "seq2seq"},
    {"model": "vit-base", "model_overrides": {"num_hidden_layers": 2}, "task": "image-classification", "num_labels": 3,
     "vocab_size": None},
    {"precision": "bf16", "vocab_size": 20_000},
])  # fmt: skip
def test_the_rough_bound_is_one(large: Recipe, values: dict[str, Any]) -> None:
    backend = load_backend("pytorch")
    device = backend.device(large)
    recipe = resolve(large.override(**values), device)
    assert peak_of(recipe) < rough_bytes(recipe, backend)


def test_training_looks_before_it_begins(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 1 << 16, 1 << 15)
    with pytest.raises(Refused, match=r"this machine has 64\.0 KiB"):
        Trainer(recipe=tiny).train()


def test_a_profile_looks_before_it_begins(large: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 1 << 16, 1 << 15)
    with pytest.raises(Refused, match=r"this machine has 64\.0 KiB"):
        profile_recipe(large)

"""A run whose blocks wait in host memory is weighed against the machine's before it begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tightfit.backends import load_backend
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.devices import Device, find_device, with_memory
from tightfit.errors import Refused
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import predict_memory
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe import Recipe
from tightfit.system import HostMemory
from tightfit.training import memory_check
from tightfit.training.session import Session

A10 = find_device("a10")
MANY = 1 << 40
FIELDS: dict[str, Any] = {
    "model": "gpt2", "model_overrides": {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 512,
                                         "tie_word_embeddings": False},
    "data": {"source": "dummy", "eval_fraction": 0}, "batch_size": 4, "micro_batch_size": 4, "seq_len": 256,
    "precision": "fp32", "attention": "sdpa", "compile": "off", "loss": "plain", "checkpointing": "every-block",
    "optimizer": "adamw", "accumulation": "by-block", "update": "with-forward",
    "offload": {"name": "host", "activations": 1}, "loading": {"workers": 0},
}


def recipe_of(**fields: Any) -> Recipe:
    return resolve(Recipe.from_dict({**FIELDS, **fields}), A10)


def needs(recipe: Recipe, device: Device = A10) -> int:
    backend = load_backend("pytorch")
    return predict_memory(backend.predict(recipe, device), recipe, device, standard_tools(backend)).host


def checked(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, total: int, free: int, device: Device = A10) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(memory_check, "host_memory", lambda: HostMemory(total=total, available=free, swap=MANY))
    Session(recipe=recipe, device=device, backend=load_backend("pytorch")).check_memory(said.append)
    return said


def test_host_memory_is_weighed_against_what_is_free_and_what_there_is(monkeypatch):
    recipe = recipe_of()
    needed = needs(recipe)

    assert checked(monkeypatch, recipe, needed, needed) == []
    (said,) = checked(monkeypatch, recipe, needed, needed - 1)
    assert said.startswith("warning: ")
    assert "of host memory are predicted to be needed for what" in said
    with pytest.raises(Refused, match=r"^host memory: .* are needed for what is offloaded .*, and the machine .*\. "
                       r"Write offload\.activations=0 \(the rest stays on the GPU\); or "):
        checked(monkeypatch, recipe, needed - 1, needed - 1)


def test_what_is_advised_fits(monkeypatch):
    """Without activations to spare, states in fewer bits and fewer blocks do."""
    recipe = recipe_of(offload="host")
    lower = {"name": "host", "weights": 0.75, "gradients": 0.75, "optimizer": 0.75}
    for changed, words in ((recipe_of(offload="host", optimizer="adamw-8bit"), "optimizer=adamw-8bit"),
                           (recipe_of(offload=lower), r"offload\.weights=0 offload\.gradients=0 ")):
        have = needs(changed)
        assert have < needs(recipe)
        with pytest.raises(Refused, match=words):
            checked(monkeypatch, recipe, have, have)


def test_a_gpu_and_a_machine_that_are_both_too_small_are_said(monkeypatch):
    recipe = recipe_of(offload="host")
    tiny = with_memory(replace(A10, name="small"), 1 << 20)
    with pytest.raises(Refused, match=r"Nothing that keeps more on this GPU fits it: write a smaller model, or"):
        checked(monkeypatch, recipe, 1 << 20, 1 << 20, tiny)


@pytest.mark.parametrize("fields", [
    {"offload": "none"}, {"offload": {"name": "host", "weights": 0, "gradients": 0, "optimizer": 0}}], ids=str)
def test_what_keeps_nothing_there_is_not_weighed(fields, monkeypatch):
    assert checked(monkeypatch, recipe_of(**fields), 1, 1) == []


def test_what_fits_by_far_is_not_predicted(monkeypatch):
    monkeypatch.setattr(PytorchBackend, "predict", None)
    assert checked(monkeypatch, recipe_of(), MANY, MANY) == []


def test_a_run_looks_before_it_begins(monkeypatch):
    monkeypatch.setattr(memory_check, "host_memory", lambda: HostMemory(total=1 << 20, available=1 << 20))
    session = Session(recipe=recipe_of(), device=A10, backend=load_backend("pytorch"))
    with pytest.raises(Refused, match=r"^host memory: .* the machine has 1\.0 MiB"):
        session.check_memory(print)

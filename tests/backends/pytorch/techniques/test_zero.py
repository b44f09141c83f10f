"""ZeRO beside each other technique: what is refused is named, and the rest learns what one process learns."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.backends.pytorch.techniques.test_processes import BESIDE, assert_same_steps
from tests.deepspeed import needs_deepspeed, zero
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.techniques.zero.library import load_deepspeed
from tightfit.errors import MissingLibrary, RecipeError
from tightfit.recipe import Recipe

REFUSED: dict[str, list[Any]] = {
    "optimizer": ["adafactor", "muon", "adamw-8bit", "adamw-4bit"], "precision": ["fp8", "fp16", "bf16-pure"],
    "compile": ["per-block", "whole"], "accumulation": ["by-block"], "offload": ["host"],
    "update": ["with-forward", "in-backward"], "trainable": ["lora"],
}  # fmt: skip
ALONE = {name: values for name, values in BESIDE.items() if values.get("precision") not in REFUSED["precision"]}


def refusals(values: dict[str, Any]) -> str:
    recipe = Recipe.from_dict(values)
    return "; ".join(recipe.refusals(PytorchBackend().device(recipe)))


@pytest.mark.parametrize(("slot", "name"), [(slot, name) for slot, names in REFUSED.items() for name in names])
def test_what_it_cannot_be_beside_is_refused_by_name(tiny, slot, name):
    said = refusals({**tiny, "parallel": "zero", slot: name})
    assert name in said
    assert "write" in said


@pytest.mark.parametrize(("knobs", "said"), [
    ({"offload": "nvme", "nvme_path": "/mnt"}, "write parallel.stage=3, or parallel.offload=cpu"),
    ({"stage": 3, "offload": "nvme"}, "offload=nvme and nvme_path go together"),
    ({"stage": 3, "nvme_path": "/mnt"}, "offload=nvme and nvme_path go together"),
])  # fmt: skip
def test_knobs_that_contradict_each_other_are_refused(tiny, knobs, said):
    assert said in refusals({**tiny, "parallel": zero(knobs)})


@pytest.mark.parametrize("name", ["segments", "tiled-mlp"])
def test_checkpointing_is_refused_in_stage_3_alone(tiny, name):
    values = {**tiny, "checkpointing": name}
    assert "parallel.stage=2" in refusals({**values, "parallel": zero({"stage": 3})})
    assert refusals({**values, "parallel": zero({"stage": 2})}) == ""


def test_a_stage_that_is_none_is_named(tiny):
    with pytest.raises(RecipeError, match=r"parallel.*stage"):
        Recipe.from_dict({**tiny, "parallel": zero({"stage": 4})})


def test_the_missing_library_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(MissingLibrary, match=r"deepspeed.*pip install 'tightfit\[deepspeed\]'"):
        load_deepspeed("cpu")


@pytest.mark.cold
@needs_deepspeed
@pytest.mark.usefixtures("deepspeed_loaded")
@pytest.mark.parametrize("knobs", [{"stage": 2}, {"stage": 3}, {"stage": 3, "offload": "cpu"}], ids=str)
def test_every_technique_learns_what_it_learns_on_one_process(tiny, tmp_path, knobs):
    beside = {name: values for name, values in ALONE.items() if name != "tiled" or knobs["stage"] < 3}
    assert_same_steps(tiny, tmp_path, zero(knobs), beside)

"""What a recipe can change to use less memory, and the advice that is made of it."""

from __future__ import annotations

import pytest

from tightfit.devices import Device, find_device
from tightfit.planning.suggestions import memory_suggestions, savings, stability_suggestions
from tightfit.recipe import Recipe

AMPERE, VOLTA = find_device("a100-80gb-sxm"), find_device("v100-16gb")
CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 34)
LEAST = {"micro_batch_size": 1, "attention": "sdpa", "checkpointing": "every-block", "optimizer": "adamw-8bit",
         "precision": {"name": "bf16-pure", "rounding": "stochastic"}}


def changes(recipe: Recipe, device: Device = AMPERE) -> list[str]:
    return [f"{saving.field}={saving.value}" for saving in savings(recipe, device)]


def test_what_keeps_the_numbers_comes_first() -> None:
    recipe = Recipe.from_dict({"micro_batch_size": 8, "attention": "eager", "checkpointing": "none",
                               "precision": "fp32", "optimizer": "adamw"})
    assert changes(recipe) == [
        "micro_batch_size=4", "attention=sdpa", "checkpointing=selective", "checkpointing=every-block",
        "precision=bf16", "optimizer=adamw-8bit", "precision=bf16-pure",
    ]


def test_what_is_open_or_saves_nothing_is_left_out() -> None:
    assert changes(Recipe()) == []
    assert changes(Recipe.from_dict(LEAST)) == []
    assert changes(Recipe.from_dict({"checkpointing": "selective"})) == ["checkpointing=every-block"]


@pytest.mark.parametrize(("device", "half"), [(AMPERE, ["bf16", "bf16-pure"]), (VOLTA, ["fp16"]),
                                              (CPU, ["bf16", "bf16-pure"])])
def test_the_half_precision_is_the_devices_own(device: Device, half: list[str]) -> None:
    assert changes(Recipe(precision="fp32"), device) == [f"precision={name}" for name in half]


def test_blocks_in_host_memory_are_followed_by_the_rest() -> None:
    more = [saving.text for saving in savings(Recipe(offload="host"), AMPERE)]
    assert more == ["offload.activations=1", "offload.activations=1 offload.embeddings=true"]
    states = {"offload": {"name": "host", "weights": 0, "gradients": 0}}
    kept = "offload.activations=1 (what blocks keep for the backward pass waits in host memory as well)"
    looped = savings(Recipe.from_dict({**states, "accumulation": "loop"}), AMPERE)
    assert [str(saving) for saving in looped] == [kept]
    some = {"offload": {"name": "host", "weights": 0.3, "gradients": 0.3, "activations": 1}}
    for recipe, first in (states, [kept]), (some, []):
        said = [str(saving) for saving in savings(Recipe.from_dict(recipe), AMPERE)]
        assert said[:-1] == [*first, "offload.weights=1 offload.gradients=1 (all blocks' weights, gradients and "
                                     "optimizer states wait in host memory)"]
        assert "offload.embeddings=true (embedding and head" in said[-1]


def test_states_are_told_by_their_bytes() -> None:
    (saving,) = savings(Recipe(optimizer="adamw-anyprecision"), AMPERE)
    assert str(saving) == ("optimizer=adamw-8bit (2 bytes of states a parameter instead of 4; changes numerics)")


def test_advice_where_no_field_saves_anything() -> None:
    least = Recipe.from_dict({**LEAST, "seq_len": 256})
    assert memory_suggestions(least, AMPERE) == ["seq_len=128, or a smaller model"]
    assert memory_suggestions(Recipe(micro_batch_size=2), AMPERE) == [
        "micro_batch_size=1 (the same global batch, more accumulation)"]
    many = Recipe.from_dict({"micro_batch_size": 8, "attention": "eager", "checkpointing": "none", "precision": "fp32"})
    assert [text.partition(" (")[0] for text in memory_suggestions(many, AMPERE)] == [
        "micro_batch_size=4", "attention=sdpa", "checkpointing=selective"]


def test_advice_against_numbers_that_run_away() -> None:
    recipe = Recipe.from_dict({"learning_rate": 3e-4, "precision": "fp16", "max_grad_norm": 0.0})
    wanted = ["learning_rate=0.0001", "warmup_steps=100", "max_grad_norm=1.0", "precision=fp32"]
    assert stability_suggestions(recipe) == wanted
    assert stability_suggestions(recipe.override(learning_rate=1e6))[0] == "learning_rate=0.001"
    adapted = recipe.override(trainable="lora", precision="fp16", base="fp16")
    assert stability_suggestions(adapted) == [*wanted[:-1], "precision=fp32 base=as-is"]

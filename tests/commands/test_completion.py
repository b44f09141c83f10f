"""What a shell is offered while a command is typed."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tightfit.bundled import BUNDLED
from tightfit.commands.completion import complete_gpu, complete_override, complete_recipe
from tightfit.devices import find_device
from tightfit.recipe import Recipe
from tightfit.recipe.yaml import apply_overrides


@pytest.mark.parametrize(("typed", "offered"), [
    ("optim", ["optimizer=", "optimizer=auto", "optimizer=adamw"]),
    ("optimizer=adamw-", ["optimizer=adamw-8bit", "optimizer=adamw-4bit", "optimizer=adamw-anyprecision"]),
    ("device=c", ["device=cpu", "device=cuda"]),
    ("pr", ["pretrained=", "precision=", "profile_step="]),
    ("max_s", ["max_steps=", "max_steps=300"]),
    ("trust", ["trust_remote_code=", "trust_remote_code=false", "trust_remote_code=true"]),
    ("parallel=a", []),
    ("report", ["report_to="]),
    ("nothing", []),
])  # fmt: skip
def test_fields(typed: str, offered: list[str]) -> None:
    assert offered_for(typed)[: len(offered) or None] == offered


@pytest.mark.parametrize(("before", "typed", "offered"), [
    (["compile=off", "optimizer", "="], "adaf", ["adafactor"]),  # words as bash breaks them
    (["optimizer"], "", ["auto", "adamw"]),
    (["loss", "=", "chunked"], "pr", ["pretrained=", "precision=", "profile_step="]),
])
def test_a_value_is_offered_alone_where_its_field_is_a_word_of_its_own(before, typed, offered) -> None:
    assert offered_for(typed, before)[: len(offered)] == offered


def offered_for(typed: str, before: list[str] | None = None) -> list[str]:
    return complete_override(SimpleNamespace(params={"overrides": before}), typed)


def test_what_is_offered_for_a_field_is_one_that_it_takes() -> None:
    for field in Recipe.model_fields:
        first, *words = offered_for(f"{field}=")
        assert first == f"{field}="
        for word in words:
            asked = {"cosine_with_min_lr": {"min_lr": 0}, "warmup_stable_decay": {"num_decay_steps": 1}}
            beside = {"eval_steps": 1, "lr_scheduler_kwargs": asked.get(word.partition("=")[2], {})}
            Recipe.from_dict(apply_overrides(beside, [word]))


def test_names() -> None:
    assert set(complete_recipe("")) > {"quickstart", *BUNDLED}
    assert complete_recipe("gpt2-l") == ["gpt2-large"]
    assert complete_gpu("rtx-409") == ["rtx-4090"]
    assert complete_gpu("l4,rtx-409") == ["l4,rtx-4090"]
    assert [find_device(name).kind for name in complete_gpu("")[2:]] == ["cuda"] * (len(complete_gpu("")) - 2)


@pytest.mark.parametrize(("words", "offered"), [
    (["tightfit", "tra"], "train"),
    (["tightfit", "train", "gpt2-l"], "gpt2-large"),
    (["tightfit", "plan", "gpt2", "--gpu", "rtx-409"], "rtx-4090"),
    (["tightfit", "train", "gpt2", "optimizer", "=", "adaf"], "adafactor"),
])  # fmt: skip
def test_bash_is_answered(words: list[str], offered: str) -> None:
    asked = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1), "_TIGHTFIT_COMPLETE": "complete_bash"}
    code = "import sys; sys.argv = ['tightfit']; from tightfit.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True,
                          check=True)
    assert done.stdout.split() == [offered]

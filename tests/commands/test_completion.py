"""What a shell is offered while a command is typed."""

from __future__ import annotations

import os
import subprocess
import sys

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
    assert complete_override(typed)[: len(offered) or None] == offered


def test_what_is_offered_for_a_field_is_one_that_it_takes() -> None:
    for field in Recipe.model_fields:
        assert complete_override(f"{field}=")[0] == f"{field}="
        for word in complete_override(f"{field}=")[1:]:
            Recipe.from_dict(apply_overrides({"eval_steps": 1}, [word]))


def test_names() -> None:
    assert set(complete_recipe("")) > {"quickstart", *BUNDLED}
    assert complete_recipe("gpt2-l") == ["gpt2-large"]
    assert complete_gpu("rtx-409") == ["rtx-4090"]
    assert [find_device(name).kind for name in complete_gpu("")[2:]] == ["cuda"] * (len(complete_gpu("")) - 2)


@pytest.mark.parametrize(("words", "offered"), [
    (["tightfit", "tra"], "train"),
    (["tightfit", "train", "gpt2-l"], "gpt2-large"),
    (["tightfit", "plan", "gpt2", "--gpu", "rtx-409"], "rtx-4090"),
])  # fmt: skip
def test_bash_is_answered(words: list[str], offered: str) -> None:
    asked = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1), "_TIGHTFIT_COMPLETE": "complete_bash"}
    code = "import sys; sys.argv = ['tightfit']; from tightfit.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True,
                          check=True)
    assert done.stdout.split() == [offered]

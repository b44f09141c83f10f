"""The tutorial's commands, run as they stand there but for most of its hundred steps: each ends as shown, and what a
reader takes from a plan is what the plan says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text("utf-8")
SHORT = ["max_steps=4", "profile_step=4", "eval_samples=16"]
KEPT = ("choice", "change", "too large", "peak allocated  ", "run folder", "report:")
"""Beginnings of lines that stand in the output word for word."""


def shown() -> list[tuple[list[str], list[str]]]:
    """Each command of the page as words, and the lines below it."""
    blocks = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE, re.DOTALL)
    return [(shlex.split(command), output.splitlines()) for command, output in blocks]


@pytest.mark.cold
def test_its_commands_say_what_it_shows(tmp_path: Path) -> None:
    recipe = PAGE.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "mine.yaml").write_text(recipe)
    fits = recipe.replace("micro_batch_size: 32", "micro_batch_size: 8").replace("loss: plain", "loss: chunked")
    (tmp_path / "fits.yaml").write_text(fits)
    environment = {**os.environ, "HOME": str(tmp_path), "COLUMNS": "80"}
    commands = shown()
    assert [words[1] for words, _ in commands] == ["plan", "plan", "compare", "train", "report"]
    for words, lines in commands:
        more = SHORT if words[1] == "train" else []
        done = subprocess.run([sys.executable, "-m", *words, *more], cwd=tmp_path, env=environment,
                              capture_output=True, text=True, check=False)
        said = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
        assert done.returncode == (2 if any(line.startswith("tightfit: ") for line in lines) else 0), done.stderr
        kept = [line for line in lines if line.startswith(KEPT)]
        assert kept
        assert [line for line in kept if line not in said] == []

"""Fresh processes of one run, each killed at a random moment: the weights end as if nothing had happened."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.training.runs import logged_losses, same_weights

STEPS = 120
BY_BLOCK = {"accumulation": "by-block", "update": "with-forward"}
KINDS = {"plain": (6, {}), "by block": (4, BY_BLOCK),
         "from host memory": (5, {**BY_BLOCK, "offload": {"name": "host", "activations": 1, "embeddings": True}})}
"""Kills of a run, and its own fields."""
TIGHTFIT = """
from tightfit.cli import main
from tightfit.techniques.offload import Host
Host.refuse = lambda *_: []
main()
"""
"""The command, on a processor whose memory stands for a card's as well."""


def command(run: dict[str, object], folder: Path) -> list[str]:
    values = {**run, "output_dir": str(folder)}
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(values))
    return [sys.executable, "-c", TIGHTFIT, "train", str(recipe)]


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.cold
@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again_from_cold(tiny, tmp_path, kind):
    wanted, fields = KINDS[kind]
    overrides = {**tiny["model_overrides"], "resid_pdrop": 0.1, "attn_pdrop": 0.1}
    run = {**tiny, "model_overrides": overrides, "data": {"source": "dummy", "samples": 37}, "max_steps": STEPS,
           "save_steps": 1, "lr_scheduler_type": "cosine", "optimizer": "adamw", "loading": {"workers": 1}, **fields}
    said = tmp_path / "said.txt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    moments = random.Random(0)
    disturbed, metrics = tmp_path / "disturbed", tmp_path / "disturbed" / "metrics.jsonl"
    for _ in range(wanted):
        with said.open("w") as output:
            process = subprocess.Popen(command(run, disturbed), env=environment, stdout=output, stderr=output)
        before, target = lines(metrics), None
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            now = lines(metrics)
            if target is None and now != before:  # it has begun; the file was cut back to the checkpoint first
                target = now + moments.randint(0, 4)
            if target is not None and now >= target:
                break
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.02))  # within a step, or as it is saved
        assert process.poll() is None, said.read_text()
        process.kill()
        process.wait()
    assert not (disturbed / "model").exists()
    for folder in (disturbed, tmp_path / "undisturbed"):
        done = subprocess.run(command(run, folder), check=False, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert same_weights(tmp_path / "undisturbed", disturbed)
    assert logged_losses(tmp_path / "undisturbed") == logged_losses(disturbed)

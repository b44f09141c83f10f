"""A whole run on the GPU: pinned memory and workers, stopped and gone on with, evaluated, exported."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tests.training.runs import StopAt, final_weights, logged_losses, train
from tightfit.profiling import profile as profiles
from tightfit.training.trainer import Trainer

pytestmark = pytest.mark.gpu
SPAWN = multiprocessing.get_context("spawn")
"""A forked child could not use a GPU that its parent has used."""


def train_and_stop(values) -> None:
    assert Trainer(recipe=values, listener=StopAt(5)).train().steps < values["max_steps"]


@pytest.fixture
def run(tiny):
    return {**tiny, "device": "cuda", "loading": {"workers": 2, "pin_memory": True}, "max_steps": 10, "save_steps": 2,
            "data": {"source": "dummy", "samples": 21}, "precision": "bf16"}


def test_a_run_goes_on_where_it_stopped(run, tmp_path):
    whole, stopped = tmp_path / "whole", Path(run["output_dir"])
    train({**run, "output_dir": str(whole)})
    process = SPAWN.Process(target=train_and_stop, args=(run,))
    process.start()
    process.join()
    assert process.exitcode == 0
    train(run)
    one, other = logged_losses(whole), logged_losses(stopped)
    assert set(one) == set(other) == set(range(1, 11))
    assert other == pytest.approx(one, rel=1e-3)  # kernels of the backward pass add up in no fixed order


def test_a_step_is_profiled_on_the_way(run, tmp_path):
    whole, folder = tmp_path / "whole", Path(run["output_dir"])
    train({**run, "output_dir": str(whole)})
    summary = Trainer(recipe={**run, "profile_step": 6}).train()
    assert logged_losses(folder) == pytest.approx(logged_losses(whole), rel=1e-3)
    found = profiles.load(folder)
    assert {path.name for path in folder.iterdir()} >= {"trace.json.gz", "memory.pickle"}
    assert summary.peak_memory >= found.peak_bytes > 0
    assert sum(found.phase_seconds.values()) == pytest.approx(found.step_seconds, rel=0.2)


def test_evaluation_and_export(run):
    from transformers import AutoModelForCausalLM

    summary = Trainer(recipe={**run, "eval_steps": 5}).train()
    assert summary.steps == 10
    folder = Path(run["output_dir"])
    assert "eval_loss" in (folder / "metrics.jsonl").read_text()
    exported = AutoModelForCausalLM.from_pretrained(folder / "model")
    weights = final_weights(folder)
    assert weights
    assert all(tensor.device.type == "cpu" for tensor in weights.values())
    assert exported.num_parameters() == summary.parameters

"""A ladder's jobs, done in this process."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from tightfit.backends.base import Timings
from tightfit.ladder import rows, worker
from tightfit.ladder.jobs import (
    JOB,
    OUTCOME,
    About,
    Figures,
    Job,
    Measure,
    Outcome,
    Predict,
    Unpredicted,
)
from tightfit.ladder.peers import PEERS
from tightfit.ladder.rows import OURS, Predicted
from tightfit.recipe import Recipe
from tightfit.system import HostMemory
from tightfit.training import memory_check

TINY: dict[str, Any] = {
    "model": "gpt2", "model_overrides": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256}, "seq_len": 32,
    "batch_size": 4, "micro_batch_size": 4, "data": "dummy", "device": "cpu", "compile": "off",
    "checkpointing": "none", "optimizer": "adamw", "attention": "sdpa", "precision": "fp32",
}  # fmt: skip


def done(tmp_path: Path, job: Job) -> Outcome:
    """A job's outcome, through its files."""
    path, outcome = tmp_path / "job.json", tmp_path / "outcome.json"
    path.write_bytes(JOB.dump_json(job))
    worker.main(path, outcome, os.getpid())
    return OUTCOME.validate_json(outcome.read_bytes())


def measured(
    tmp_path: Path, within: dict[str, Any] | None = None, runner: str = OURS, memory: int | None = None, **changes: Any
) -> Outcome:
    recipe = Recipe.from_dict({**TINY, **changes})
    return done(tmp_path, Measure(recipe=recipe.to_dict(), runner=runner, launch="single", within=within, memory=memory,
                                  warm_up=1, steps=2))


def figures(tmp_path: Path, within: dict[str, Any] | None = None, **changes: Any) -> Figures:
    """Of a rung that is measured."""
    outcome = measured(tmp_path, within, **changes)
    assert outcome.figures is not None, outcome.reason
    return outcome.figures


def test_a_rung_is_measured(tmp_path: Path) -> None:
    found = figures(tmp_path, micro_batch_size="auto")
    assert len(found.seconds) == 2
    assert len(found.losses) == 4
    assert (found.samples, found.tokens, found.context) == (4, 128, None)
    assert found.recipe["micro_batch_size"] == 4
    assert found.peak_allocated > 100_000


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    found = measured(tmp_path, attention="flex")
    assert found.status == "refused"
    assert "attention" in found.reason
    found = measured(tmp_path, seq_len=2000)
    assert found.status == "failed"
    assert "seq_len" in found.reason


@pytest.mark.parametrize("runner", [OURS, "plain"])
def test_a_rung_that_memory_cannot_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    monkeypatch.setattr(memory_check, "host_memory", lambda: HostMemory(total=1 << 16, available=1 << 15))
    found = measured(tmp_path, runner=runner)
    assert found.status == "refused"
    assert "this machine has 64 KiB: the system would end the run. No micro-batch is small enough" in found.reason


def test_a_loss_that_is_no_number_is_a_reason_and_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = Timings(seconds=(0.1, 0.1), losses=(0.7, math.nan, 0.7, 0.7), peak_allocated=1, peak_reserved=1)
    monkeypatch.setitem(PEERS, "plain", lambda *asked: timings)
    found = measured(tmp_path, runner="plain")
    assert found.status == "failed"
    assert found.reason.startswith("the loss of step 2 is nan")


def test_a_growing_rung_takes_the_batch_that_checkpointing_frees(tmp_path: Path) -> None:
    plain = Recipe.from_dict({**TINY, "model_overrides": {**TINY["model_overrides"], "n_layer": 6}, "seq_len": 128})
    found = figures(tmp_path, plain.to_dict(), checkpointing="every-block", seq_len=128,
                    model_overrides=plain.model_overrides)
    same = figures(tmp_path, seq_len=128, model_overrides=plain.model_overrides)
    assert found.samples > 4
    assert found.recipe["micro_batch_size"] == found.samples
    assert found.peak_allocated <= 1.01 * same.peak_allocated
    assert f"batch_size {found.samples}" in found.notes


def test_rungs_are_predicted_into_the_results(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    row = Predicted(ladder="l", rung="r", scale="full", key="k", device="t4")
    good, bad = Recipe.from_dict(TINY).to_dict(), Recipe.from_dict({**TINY, "precision": "bf16"}).to_dict()
    rungs = [Unpredicted(row=row, recipe=recipe, within=None) for recipe in (good, bad, {**good, "seq_len": 100_000})]
    found = done(tmp_path, Predict(rungs=tuple(rungs), gpu="t4", memory=None, results=str(path)))
    first, second, third = rows.read(path).predicted
    assert found == Outcome()
    assert first.date
    assert first.versions["torch"]
    assert first.fits == "yes"
    assert first.context > 100 << 20
    assert first.samples == 4
    assert first.step_seconds > 0
    assert second.fits == ""
    assert "bf16" in second.reason
    assert third.fits == ""
    assert "seq_len" in third.reason


def test_what_is_predicted_for_this_machine_is_what_a_step_takes(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    rung = Unpredicted(row=Predicted(ladder="l", rung="r", scale="full", key="k", device="CPU"),
                       recipe=Recipe.from_dict(TINY).to_dict(), within=None)
    done(tmp_path, Predict(rungs=(rung,), gpu=None, memory=None, results=str(path)))
    other = figures(tmp_path)  # whatever else this process holds
    (found,) = rows.read(path).predicted
    assert found.context == 0
    assert found.peak_reserved <= 1.002 * other.peak_allocated


def test_the_machine_is_told(tmp_path: Path) -> None:
    found = done(tmp_path, About(recipe=Recipe.from_dict(TINY).to_dict())).machine
    assert found is not None
    assert (found.device, found.kind, found.driver) == ("CPU", "cpu", None)
    assert found.versions["torch"]
    assert found.memory_bytes > 1 << 30


def test_a_limit_on_memory_is_for_gpus(tmp_path: Path) -> None:
    found = measured(tmp_path, memory=1 << 33)
    assert found.status == "refused"
    assert "gpu-memory" in found.reason


def test_only_the_first_of_several_processes_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(FileNotFoundError):
        done(tmp_path, About(recipe=Recipe.from_dict(TINY).to_dict()))

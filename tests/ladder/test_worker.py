"""A ladder's jobs, done in this process."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tightfit.backends.measurements import Timings
from tightfit.ladder import worker
from tightfit.ladder.jobs import Job, Outcome
from tightfit.ladder.peers import Peer
from tightfit.ladder.rows import OURS, Machine
from tightfit.recipe import Recipe
from tightfit.system import HostMemory
from tightfit.training import memory_check

pytestmark = pytest.mark.usefixtures("few_objects")

TINY: dict[str, Any] = {
    "model": "gpt2", "model_overrides": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256}, "seq_len": 32,
    "batch_size": 4, "micro_batch_size": 4, "data": "dummy", "device": "cpu", "compile": "off",
    "checkpointing": "none", "optimizer": "adamw", "attention": "sdpa", "precision": "fp32",
}  # fmt: skip


def outcomes(tmp_path: Path, *jobs: Job) -> list[Outcome]:
    """The jobs' outcomes, through their files."""
    asked, written = tmp_path / "jobs", tmp_path / "outcomes"
    asked.write_text("\n".join(job.model_dump_json() for job in jobs))
    written.unlink(missing_ok=True)
    worker.main(asked, written, os.getpid())
    return [Outcome.model_validate_json(line) for line in written.read_bytes().splitlines()]


def measured(
    tmp_path: Path, within: dict[str, Any] | None = None, runner: str = OURS, memory: int | None = None, **changes: Any
) -> Outcome:
    recipe = Recipe.from_dict({**TINY, **changes})
    (found,) = outcomes(tmp_path, Job(kind="measure", recipe=recipe.to_dict(), runner=runner, within=within,
                                      memory=memory, warm_up=1, steps=2))
    return found


def figures(tmp_path: Path, within: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    """Of a rung that is measured."""
    outcome = measured(tmp_path, within, **changes)
    assert outcome.status == "done", outcome.reason
    return SimpleNamespace(**outcome.values)


def test_a_rung_is_measured_on_whole_global_batches_alone(tmp_path: Path) -> None:
    whole, short = (figures(tmp_path, data={"source": "dummy", "samples": samples}, batch_size=16, micro_batch_size=16)
                    for samples in (64, 17))  # of which every other global batch would hold one sample
    assert whole.peak_allocated == short.peak_allocated


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
    assert found.status == "refused"
    assert "seq_len" in found.reason
    found = measured(tmp_path, data="nowhere.txt")
    assert found.status == "failed"
    assert "nowhere.txt" in found.reason


@pytest.mark.parametrize("runner", [OURS, "plain"])
def test_a_rung_that_memory_cannot_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    monkeypatch.setattr(memory_check, "host_memory", lambda: HostMemory(total=1 << 16, available=1 << 15))
    found = measured(tmp_path, runner=runner)
    assert found.status == "refused"
    assert "this machine has 64.0 KiB: the system would end the run. No micro-batch is small enough" in found.reason


def test_a_loss_that_is_no_number_is_a_reason_and_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = Timings(seconds=(0.1, 0.1), losses=(0.7, math.nan, 0.7, 0.7), peak_allocated=1, peak_reserved=1)
    monkeypatch.setattr(Peer, "run", lambda *asked: timings)
    found = measured(tmp_path, runner="plain")
    assert found.status == "failed"
    assert found.reason == "the loss of step 2 is nan: its step times say nothing of training"


@pytest.mark.cold
def test_a_growing_rung_takes_the_batch_that_checkpointing_frees(tmp_path: Path) -> None:
    plain = Recipe.from_dict({**TINY, "model_overrides": {**TINY["model_overrides"], "n_layer": 6}, "seq_len": 128})
    found = figures(tmp_path, plain.to_dict(), checkpointing="every-block", seq_len=128,
                    model_overrides=plain.model_overrides)
    same = figures(tmp_path, seq_len=128, model_overrides=plain.model_overrides)
    assert found.samples > 4
    assert found.recipe["micro_batch_size"] == found.samples
    assert found.peak_allocated <= 1.01 * same.peak_allocated
    assert f"batch_size {found.samples}" in found.notes


def test_rungs_are_predicted_one_after_the_other(tmp_path: Path) -> None:
    good, bad = Recipe.from_dict(TINY).to_dict(), Recipe.from_dict({**TINY, "precision": "bf16"}).to_dict()
    first, second, third = outcomes(tmp_path, *(Job(kind="predict", recipe=recipe, gpu="t4")
                                                for recipe in (good, bad, {**good, "seq_len": 100_000})))
    assert (first.status, first.values["fits"], first.values["samples"]) == ("done", "yes", 4)
    assert first.values["context"] > 100 << 20
    assert first.values["step_seconds"] > 0
    assert (second.status, third.status) == ("refused", "refused")
    assert "bf16" in second.reason
    assert "seq_len" in third.reason


def test_what_is_predicted_for_this_machine_is_what_a_step_takes(tmp_path: Path) -> None:
    (found,) = outcomes(tmp_path, Job(kind="predict", recipe=Recipe.from_dict(TINY).to_dict()))
    other = figures(tmp_path)  # whatever else this process holds
    assert found.values["context"] == 0
    assert found.values["peak_reserved"] <= 1.002 * other.peak_allocated


def test_the_machine_is_described(tmp_path: Path) -> None:
    (outcome,) = outcomes(tmp_path, Job(kind="machine", recipe=Recipe.from_dict(TINY).to_dict()))
    found = Machine(**outcome.values)
    assert (found.device, found.kind, found.driver) == ("CPU", "cpu", None)
    assert found.versions["torch"]
    assert found.memory_bytes > 1 << 30


@pytest.mark.parametrize(("changes", "reason"), [
    ({"data": "nowhere.txt"}, "data: 'nowhere.txt'"), ({"seq_len": 2000}, "seq_len: 2000 exceeds"),
    ({"model": "no-such-model"}, "model: 'no-such-model'"),
    ({"model_overrides": {"n_embd": 63, "n_head": 2}}, "must be divisible by num_heads"),
    ({"model": "bert-base", "model_overrides": {}, "backend": "jax"}, "no causal-lm model of type 'bert'"),
])  # fmt: skip
def test_what_is_wrong_with_the_recipe_itself_is_found_with_the_machine(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    recipe = Recipe.from_dict({**TINY, **changes})
    (found,) = outcomes(tmp_path, Job(kind="machine", recipe=recipe.to_dict()))
    assert found.status != "done"
    assert reason in found.reason


def test_a_limit_on_memory_is_for_gpus(tmp_path: Path) -> None:
    found = measured(tmp_path, memory=1 << 33)
    assert found.status == "refused"
    assert "gpu-memory" in found.reason

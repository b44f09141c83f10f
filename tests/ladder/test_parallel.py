"""Rungs on two devices: two processes do one's work, and what goes wrong in one ends both."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.errors import Refused
from tightfit.ladder import worker
from tightfit.ladder.catalogue import ladders
from tightfit.ladder.jobs import Job, Outcome, command, run_jobs
from tightfit.ladder.rungs import Launch
from tightfit.ladder.two_devices import run_parallel
from tightfit.recipe import Recipe

NO_DROPOUT = [f"model_overrides.{name}=0" for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]


def rung(*overrides: str) -> Recipe:
    """A rung of the ladder of two devices, at its smallest."""
    ladder = ladders()["ddp"]
    return ladder.recipe(ladder.rung("DDP"), "smallest", ["device=cpu", *NO_DROPOUT, *overrides])


@pytest.mark.cold
def test_two_processes_do_the_work_of_one():
    """Seven samples: four for one process, three for the other, in micro-batches of three, two and one."""
    recipe = rung("batch_size=7", "micro_batch_size=3")
    one, two = (measured(recipe, launch) for launch in ("single", "ddp"))
    assert two.losses == pytest.approx(one.losses, abs=1e-5)
    assert two.samples == 7
    assert len(two.seconds) == 2
    assert 0.5 * one.peak_allocated < two.peak_allocated < 2 * one.peak_allocated


def measured(recipe: Recipe, launch: Launch) -> SimpleNamespace:
    """Figures of a job in processes of its own: what else this one holds would count towards its peak."""
    (outcome,) = run_jobs([Job(kind="measure", recipe=recipe.to_dict(), launch=launch, warm_up=1, steps=2)], 300)
    assert outcome.status == "done", outcome.reason
    return SimpleNamespace(**outcome.values)


def test_two_gpus_are_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    recipe = rung()
    device = PytorchBackend().device(recipe)
    with pytest.raises(Refused, match="two GPUs, and this machine has 0"):
        run_parallel("dp", recipe, device, 1, 1)
    with pytest.raises(Refused, match="NCCL switches off the direct link between two GPUs"):
        run_parallel("ddp-no-p2p", recipe, device, 1, 1)
    assert command("ddp-no-p2p", ["worker"])[1] == {"NCCL_P2P_DISABLE": "1"}


@pytest.mark.parametrize(("rank", "status", "written", "ended"), [
    ("0", "done", True, []), ("1", "done", False, []), ("1", "out-of-memory", True, [1]),
])
def test_the_first_process_says_what_came_of_a_job_and_one_that_fails_ends_the_others(rank, status, written, ended,
                                                                                      monkeypatch, tmp_path):
    seen: list[int] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(worker.os, "_exit", seen.append)
    monkeypatch.setitem(worker.KINDS, "machine", lambda job: Outcome(status=status))
    asked, outcomes = tmp_path / "jobs", tmp_path / "outcomes"
    asked.write_text(Job(kind="machine", recipe={}).model_dump_json())
    worker.main(asked, outcomes, psutil.Process().ppid())
    assert outcomes.exists() == written
    assert seen == ended

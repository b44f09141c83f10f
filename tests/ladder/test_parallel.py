"""Rungs on two devices: two processes do one's work, and none of them outlives its ladder."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import tensor_window
from tightfit.data import prepare
from tightfit.data.loading import WindowLoader
from tightfit.errors import Refused
from tightfit.ladder import parallel, running, worker
from tightfit.ladder.catalogue import find_ladder
from tightfit.ladder.parallel import command, own_words, run_parallel, writes_outcome
from tightfit.ladder.two_devices import LossSum
from tightfit.models import model_facts
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe

NO_DROPOUT = [f"model_overrides.{name}=0" for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]


def rung(*overrides: str) -> Recipe:
    """A rung of the ladder of two devices, at its smallest."""
    ladder = find_ladder("ddp")
    return ladder.recipe(ladder.rung("DDP"), "smallest", ["device=cpu", *NO_DROPOUT, *overrides])


def test_two_processes_do_the_work_of_one():
    """Seven samples: four for one process, three for the other, in micro-batches of three, two and one."""
    recipe = rung("batch_size=7", "micro_batch_size=3")
    job = {"job": "measure", "recipe": recipe.to_dict(), "runner": "tightfit", "launch": "ddp", "within": None,
           "memory": None, "warm_up": 1, "steps": 2}  # fmt: skip
    found = running._job(job, 300, "ddp")
    assert found["status"] == "done", found
    backend = PytorchBackend()
    recipe = resolve(recipe, backend.device(recipe))
    step = backend.step(backend.build(recipe, backend.device(recipe)))
    data = WindowLoader(prepare(recipe, model_facts(recipe)).train, recipe)
    one = backend.time(step, step.windows(data, 0, 4), 1, 2)
    assert found["losses"] == pytest.approx(one.losses, abs=1e-5)
    assert found["samples"] == 7
    assert len(found["seconds"]) == 2
    assert 0.5 * one.peak_allocated < found["peak_allocated"] < 2 * one.peak_allocated


def test_two_gpus_are_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("RANK", "0")
    recipe = rung()
    device = PytorchBackend().device(recipe)
    with pytest.raises(Refused, match="two GPUs, and this machine has 0"):
        run_parallel("dp", recipe, device, 1, 1)
    with pytest.raises(Refused, match="NCCL switches off the direct link between two GPUs"):
        run_parallel("ddp-no-p2p", recipe, device, 1, 1)
    assert command("ddp-no-p2p", ["worker"])[1] == {"NCCL_P2P_DISABLE": "1"}
    with pytest.raises(Refused, match="batch_size: a step of one sample"):
        run_parallel("ddp", rung("batch_size=1", "micro_batch_size=1"), device, 1, 1)


@pytest.mark.parametrize(("rank", "status", "written"), [("0", "done", True), ("1", "done", False),
                                                         ("1", "out-of-memory", True)])  # fmt: skip
def test_the_first_process_says_what_came_of_a_job_and_others_what_went_wrong(rank, status, written, monkeypatch,
                                                                              tmp_path):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setitem(worker.JOBS, "about", lambda asked: {"status": status})
    job, outcome = tmp_path / "job.json", tmp_path / "outcome.json"
    job.write_text(json.dumps({"job": "about", "parent": psutil.Process().ppid()}), "utf-8")
    worker.main(job, outcome)
    assert writes_outcome({"status": status}) == outcome.exists() == written


@pytest.mark.parametrize(("joined", "status", "ended"), [(True, "out-of-memory", [1]), (True, "done", []),
                                                         (False, "refused", [])])  # fmt: skip
def test_a_process_that_fails_ends_those_that_wait_for_it(joined, status, ended, monkeypatch):
    seen: list[int] = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: joined)
    monkeypatch.setattr(parallel.os, "_exit", seen.append)
    parallel.end_others({"status": status})
    assert seen == ended


REPORT = """Traceback (most recent call last):
KeyError: 'what went wrong'
E1121 16:22:29.252000 30109 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def test_what_processes_say_is_told_from_torchruns_report():
    assert own_words("one\ntwo") == ("one\ntwo", False)
    assert running._without_outcome(1, REPORT.format(code=1))["reason"].startswith("KeyError: 'what went wrong' (")
    assert running._without_outcome(1, REPORT.format(code=-9))["status"] == "out-of-memory"


CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_processes_with_sessions_of_their_own_are_ended_too(tmp_path: Path):
    def gone(pid: int) -> bool:
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    process: Any = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, start_new_session=True)
    with process.stdout, running._ended(process):
        child = int(process.stdout.readline())
        assert not gone(child)
    for _ in range(100):
        if gone(child):
            return
        time.sleep(0.1)
    pytest.fail("the child is still there")


def copied(module: torch.nn.Module) -> torch.nn.Module:
    """A copy such as DataParallel makes for a GPU: its weights are tensors and no parameters."""
    copies = {part: part._replicate_for_data_parallel() for part in module.modules()}
    weights = {parameter: parameter.clone() for parameter in module.parameters()}
    for part, copy in copies.items():
        for name, child in part.named_children():
            setattr(copy, name, copies[child])
        for name, parameter in part._parameters.items():
            setattr(copy, name, None if parameter is None else weights[parameter])
    return copies[module]


IMAGES = {"model": "vit-base", "task": "image-classification", "num_labels": 4, "checkpointing": "none",
          "model_overrides": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "image_size": 32,
                              "intermediate_size": 64, "hidden_dropout_prob": 0.0}}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, IMAGES], ids=["gpt2", "vit"])
def test_a_copy_of_the_model_has_the_models_loss_and_gradients(changes):
    recipe = rung().override(**changes)
    backend = PytorchBackend()
    build = backend.build(recipe, backend.device(recipe))
    data = WindowLoader(prepare(recipe, model_facts(recipe)).train, recipe)
    batch = vars(tensor_window(data.window(0)).micro_batches[0])
    losses, gradients = [], []
    for module in (LossSum(build), copied(LossSum(build))):
        loss = module(**batch).sum()
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in build.model.parameters() if p.grad is not None])
        build.model.zero_grad()
    assert losses[0] == losses[1]
    assert len(gradients[0]) == len(gradients[1]) > 10
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))

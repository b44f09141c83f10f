"""Several processes that train one model: they learn what one learns, and stop, fail and go on together."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.own_models import Scores
from tests.training import processes as several
from tests.training.processes import in_processes, recorded, started, train_in
from tightfit.backends import load_backend
from tightfit.backends.pytorch import checkpoints as module_of_states
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.world import joined
from tightfit.backends.world import ERROR_SAID, LAUNCHER, OUT_OF_MEMORY, PROCESS_LOST, LaunchedProcess, launched_process
from tightfit.devices import find_device
from tightfit.errors import CheckpointError, DataError, LostProcess, ModelError, Refused, SaidElsewhere, TightfitError
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.training.trainer import Trainer

KINDS: dict[str, Any] = {"ddp": "ddp", "fsdp": "fsdp", "fsdp offloaded": {"name": "fsdp", "cpu_offload": True},
         "fsdp last": {"name": "fsdp", "gradient_sync": "last", "reshard": False}}
each_kind = pytest.mark.parametrize("parallel", [
    pytest.param(kind, marks=[pytest.mark.cold] * (name == "fsdp last"), id=name) for name, kind in KINDS.items()])


@pytest.fixture
def run(tiny):
    return {**tiny, **several.RAGGED}


@pytest.fixture(autouse=True, scope="module")
def loaded():
    """Libraries that take seconds to load, before any process is forked."""
    load_backend("pytorch")
    import_module("transformers.models.gpt2.modeling_gpt2")


@each_kind
def test_two_processes_learn_what_one_learns(run, tmp_path, parallel):
    several.assert_sizes_learn_alike(run, tmp_path, parallel)
    assert max(recorded(tmp_path / "1", "grad_norm")) > run["max_grad_norm"]


def test_classes_are_counted_over_all_processes(run, tmp_path):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 32,
             "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    run = {**run, "model": "bert-base", "model_overrides": sizes, "task": "sequence-classification", "num_labels": 5,
           "data": {"source": "dummy", "samples": 60, "eval_fraction": 0.5}, "max_steps": 2}
    for size in (1, 2):
        train_in(size, {**run, "output_dir": str(tmp_path / str(size))})
    found = recorded(tmp_path / "1", "eval_f1")
    assert recorded(tmp_path / "2", "eval_f1") == pytest.approx(found, abs=1e-9)
    assert 0 < found[0] < 1


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_choose_the_checkpoint_that_one_chooses(run, tmp_path, parallel):
    best = {"load_best_model_at_end": True, "early_stopping_patience": 2, "eval_steps": 1, "save_steps": None,
            "learning_rate": 0.02, "max_steps": 30}
    for size in (1, 2):
        train_in(size, {**run, **best, "output_dir": str(tmp_path / str(size))}, parallel)
    assert recorded(tmp_path / "2", "eval_loss") == pytest.approx(recorded(tmp_path / "1", "eval_loss"), rel=1e-3)
    one, two = (json.loads((tmp_path / size / "summary.json").read_text()) for size in ("1", "2"))
    assert one["early_stopped"]
    assert (one["steps"], one["best_step"]) == (two["steps"], two["best_step"])
    assert one["best_step"] < one["steps"]


@each_kind
def test_processes_without_a_sample_take_part(run, tmp_path, parallel):
    several.assert_learns_without_samples(run, tmp_path, parallel)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_process_without_a_sample_sends_no_token_to_an_expert(run, tmp_path, parallel):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 32, "intermediate_size": 64,
             "head_dim": 8}  # fmt: skip
    run = {**run, "model": "moe-tiny", "model_overrides": sizes, "data": {"source": "dummy", "samples": 5},
           "batch_size": 2, "micro_batch_size": 1, "router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.1,
           "max_steps": 3}  # fmt: skip
    for size in (1, 3):
        train_in(size, {**run, "output_dir": str(tmp_path / str(size))}, parallel)
    for name in ("loss", "grad_norm", "balance_loss", "router_z_loss", "expert_load"):
        assert recorded(tmp_path / "3", name) == pytest.approx(recorded(tmp_path / "1", name), rel=1e-5)


@each_kind
def test_a_run_goes_on_with_another_number_of_processes(run, tmp_path, parallel):
    several.assert_goes_on(run, tmp_path, [(size, parallel) for size in (2, 3, 1)])


def test_a_plan_before_leaves_nothing_that_a_resumed_run_takes_for_its_own(run, tmp_path):
    """DTensor caches which parts a process has; a plan's are the first one's."""
    recipe = Recipe.from_dict({**run, "parallel": "fsdp"}).with_processes(2)
    device = replace(find_device("rtx-3090"), cards=2)
    load_backend("pytorch").predict(resolve(recipe, device), device)
    for steps in (5, 8):
        train_in(2, {**run, "max_steps": steps, "output_dir": str(tmp_path / "two")}, "fsdp")
    train_in(1, {**run, "max_steps": 8, "output_dir": str(tmp_path / "one")})
    assert recorded(tmp_path / "two", "loss") == pytest.approx(recorded(tmp_path / "one", "loss"), abs=2e-6)


def test_a_process_may_have_no_part_of_a_narrow_weight(run, tmp_path):
    """An image model's class token and positions are one row each."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "image_size": 32,
             "intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
    run = {**run, "model": "vit-base", "task": "image-classification", "num_labels": 4, "vocab_size": None,
           "model_overrides": sizes, "max_steps": 3, "save_steps": 1, "eval_steps": None}  # fmt: skip
    several.assert_sizes_learn_alike(run, tmp_path, "fsdp")


def test_with_dropout_each_process_draws_its_own_and_a_stopped_run_goes_on_bit_for_bit(run, tmp_path):
    several.assert_goes_on_exactly(run, tmp_path, "ddp")


def endless(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**run, "parallel": {"name": "ddp", "timeout": 20}, "max_steps": 1_000_000, "eval_steps": None,
            "save_steps": 2, "output_dir": str(folder)}  # fmt: skip


def train_to_a_signal(values: dict[str, Any]) -> None:
    assert Trainer(recipe=values).train().stopped_by == "SIGTERM"


def wait_for_steps(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while not (folder / "metrics.jsonl").exists() or len(recorded(folder, "loss")) < 5:
        time.sleep(0.01)
        assert time.monotonic() < deadline


def test_a_signal_to_one_process_stops_all_at_one_step(run, tmp_path):
    processes = started(2, train_to_a_signal, endless(run, tmp_path / "run"))
    wait_for_steps(tmp_path / "run")
    assert processes[1].pid is not None
    os.kill(processes[1].pid, signal.SIGTERM)
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    steps = len(recorded(tmp_path / "run", "loss"))
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps:08d}").is_dir()


def train_until_lost(values: dict[str, Any]) -> None:
    destroy = dist.destroy_process_group

    def destroy_as_the_last_holder() -> None:
        assert not any(type(held) is DistributedDataParallel for held in gc.get_objects())
        destroy()

    said = "another process of this run ended, or did not answer within parallel.timeout; the same command goes on"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", destroy_as_the_last_holder)
        with pytest.raises(LostProcess, match=said):
            Trainer(recipe=values).train()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_the_others_and_the_run_goes_on(run, tmp_path, rank):
    folder = tmp_path / "run"
    processes = started(2, train_until_lost, endless(run, folder))
    wait_for_steps(folder)
    processes[rank].kill()
    for process in processes:
        process.join(30)
    assert processes[1 - rank].exitcode == 0
    done = int(max(path.name for path in (folder / "checkpoints").glob("step-*")).removeprefix("step-"))
    train_in(2, {**endless(run, folder), "max_steps": done + 1}, "ddp")
    train_in(1, {**run, "eval_steps": None, "max_steps": done + 1, "output_dir": str(tmp_path / "whole")})
    assert recorded(folder, "loss") == pytest.approx(recorded(tmp_path / "whole", "loss"), abs=2e-6)


def train_slowly(values: dict[str, Any], folder: Path, seconds: float) -> None:
    """The second process takes that long over its second step."""
    own = Step.accumulate

    def slow(step: Step, global_batch: Any) -> Tensor:
        if step.build.world.rank == 1 and step.steps == 1:
            time.sleep(seconds)
        return own(step, global_batch)

    Step.accumulate = slow  # type: ignore[assignment, method-assign]
    try:
        Trainer(recipe=values).train()
    except (LostProcess, SaidElsewhere) as error:
        (folder / os.environ["RANK"]).write_text(str(error))
        sys.exit(3)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.cold)])
def test_a_process_that_is_slow_is_waited_for_until_the_timeout(run, tmp_path, parallel):
    run = {**run, "max_steps": 3, "save_steps": 1, "eval_steps": None, "output_dir": str(tmp_path / "run")}
    impatient = {**run, "parallel": {"name": parallel, "timeout": 3}}
    assert in_processes(2, train_slowly, impatient, tmp_path, 5.0) == [3, 3]
    assert "did not answer within parallel.timeout" in (tmp_path / "0").read_text()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    patient = {**run, "parallel": {"name": parallel, "timeout": 20}}
    assert in_processes(2, train_slowly, patient, tmp_path, 1.0) == [0, 0]
    train_in(1, {**run, "output_dir": str(tmp_path / "whole")})
    assert recorded(tmp_path / "run", "loss") == pytest.approx(recorded(tmp_path / "whole", "loss"), abs=2e-6)


def train_to_an_end_in_saving(values: dict[str, Any], how: str, rank: int, said: Path) -> None:
    """One process ends, or finds the disk full, while the second checkpoint is written."""
    write, begun = module_of_states.random_state, []

    def ends() -> Any:
        begun.append(1)
        if int(os.environ["RANK"]) == rank and len(begun) == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")
        return write()

    module_of_states.random_state = ends
    try:
        Trainer(recipe=values).train()
    except (LostProcess, CheckpointError, SaidElsewhere) as error:
        with said.open("a") as file:
            file.write(f"{type(error).__name__}: {error}\n")
        sys.exit(3)


@pytest.mark.parametrize(("how", "rank", "status"), [
    ("killed", 0, -signal.SIGKILL), ("killed", 1, -signal.SIGKILL), ("full", 0, 3), ("full", 1, 3),
])  # fmt: skip
def test_a_process_that_ends_while_a_checkpoint_is_written_leaves_the_one_before(run, tmp_path, how, rank, status):
    run = {**run, "max_steps": 6, "save_steps": 2, "eval_steps": None, "output_dir": str(tmp_path / "run"),
           "parallel": {"name": "fsdp", "timeout": 20}}  # fmt: skip
    codes = in_processes(2, train_to_an_end_in_saving, run, how, rank, tmp_path / "said")
    assert (codes[rank], codes[1 - rank]) == (status, 3)
    lines = (tmp_path / "said").read_text().splitlines()
    if how == "full":
        assert sum(line.startswith("CheckpointError") and "No space left" in line for line in lines) == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000002"]
    train_in(2, run, run["parallel"])
    train_in(1, {**run, "output_dir": str(tmp_path / "whole"), "parallel": "none"})
    assert recorded(tmp_path / "run", "loss") == pytest.approx(recorded(tmp_path / "whole", "loss"), abs=2e-6)


def fail_once(values: dict[str, Any], said: Path) -> None:
    try:
        Trainer(recipe=values).train()
    except DataError as error:
        with said.open("a") as file:
            file.write(f"{error}\n")
    except SaidElsewhere as error:
        sys.exit(error.status)


def test_an_error_of_all_is_said_by_one(run, tmp_path):
    said = tmp_path / "said"
    values = {**run, "parallel": "ddp", "batch_size": 64}
    assert sorted(in_processes(2, fail_once, values, said)) == [0, 2]
    assert said.read_text().splitlines() == [said.read_text().strip()]
    assert "fewer than one global batch" in said.read_text()


def train_out_of_memory(values: dict[str, Any], said: Path) -> None:
    """The second process finds no room in its third step."""
    own = Step.forward

    def forward(step: Step, global_batch: Any, number: int) -> Tensor:
        if step.build.world.rank == 1 and step.steps == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 bytes")
        return own(step, global_batch, number)

    Step.forward = forward  # type: ignore[assignment, method-assign]
    try:
        Trainer(recipe=values).train()
    except TightfitError as error:
        if not isinstance(error, SaidElsewhere):
            with said.open("a") as file:
                file.write(f"{error}\n")
        sys.exit(error.status)


@each_kind
@pytest.mark.parametrize(("changes", "ours", "status", "expected"), [
    ({}, True, OUT_OF_MEMORY, "Tried to allocate 9 bytes"),
    ({}, False, ERROR_SAID, r"Tried to allocate 9 bytes\. Try: micro_batch_size=1 \(.*\); or .*"),
    ({"recover": False}, True, ERROR_SAID, r"Tried to allocate 9 bytes\. Try: micro_batch_size=1 \(.*\); or .*"),
], ids=["goes on", "not of our launcher", "not wanted"])  # fmt: skip
def test_memory_that_runs_out_in_one_process_ends_all_and_is_said_once(
    run, tmp_path, monkeypatch, parallel, changes, ours, status, expected
):
    if ours:
        monkeypatch.setenv(LAUNCHER, str(os.getpid()))
    said = tmp_path / "said"
    values = {**run, "save_steps": 1, "eval_steps": None, **changes, "parallel": parallel}
    assert in_processes(2, train_out_of_memory, values, said) == [PROCESS_LOST, status]
    assert re.fullmatch(rf"out of memory in the step: {expected}\n", said.read_text())


class Spare(Scores):
    """A model of which a layer has no part in the loss."""

    def __init__(self) -> None:
        super().__init__(128)
        self.spare = nn.Linear(16, 16)


def train_spare(values: dict[str, Any]) -> None:
    torch.manual_seed(0)
    if values["parallel"] != "ddp":
        Trainer(Spare(), values).train()
        return
    with pytest.raises((ModelError, SaidElsewhere), match="some of Spare have no part in the loss"):
        Trainer(Spare(), values).train()


def test_parameters_without_a_part_in_the_loss(run, tmp_path):
    run = {name: value for name, value in run.items() if name not in ("model", "model_overrides")}
    for parallel in ("none", "fsdp", "ddp"):
        values = {**run, "parallel": parallel, "output_dir": str(tmp_path / parallel)}
        size = 1 if parallel == "none" else 2
        assert in_processes(size, train_spare, values) == [0] * size
    assert recorded(tmp_path / "fsdp", "loss") == pytest.approx(recorded(tmp_path / "none", "loss"), abs=2e-6)


def test_places_by_launcher():
    assert launched_process({}) is None
    torchrun = launched_process({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    assert (torchrun.rank, torchrun.size, torchrun.local_rank, dict(torchrun.rendezvous)) == (3, 4, 1, {})
    srun = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "12"}
    for hosts in ("node[07-09,12],login1", "node07,node[08-09]", "node07"):
        found = launched_process({**srun, "SLURM_STEP_NODELIST": hosts})
        assert (found.rank, found.size, found.local_rank) == (5, 8, 1)
        assert found.rendezvous == {"MASTER_ADDR": "node07", "MASTER_PORT": "20012"}
    assert launched_process({**srun, "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(("variables", "said"), [
    ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is no number"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, and of WORLD_SIZE=2 processes the last is 1"),
    ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "a"}, "SLURM_PROCID is ''"),
])  # fmt: skip
def test_variables_that_name_no_place_are_named(variables, said):
    with pytest.raises(Refused, match=re.escape(said)):
        launched_process(variables)


@pytest.mark.parametrize(("device", "missing", "said"), [
    ("cpu", "is_gloo_available", "built without gloo"), ("cuda", "is_nccl_available", "built without NCCL"),
])  # fmt: skip
def test_a_machine_without_what_processes_exchange_tensors_by_is_told_so(monkeypatch, device, missing, said):
    for name in ("is_gloo_available", "is_nccl_available"):
        monkeypatch.setattr(torch.distributed, name, lambda name=name: name != missing)
    place = LaunchedProcess(rank=0, size=2, local_rank=0)
    with pytest.raises(Refused, match=said), joined(place, device, 10):
        pass


def test_a_port_that_is_taken_is_named_at_once(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        place = LaunchedProcess(rank=0, size=2, local_rank=0)
        with pytest.raises(Refused, match=rf"port {taken.getsockname()[1]}.*taken"), joined(place, "cpu", 10):
            pass


def test_a_launcher_that_says_too_little_is_told_what_is_missing(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(Refused, match="MASTER_ADDR"), joined(LaunchedProcess(rank=0, size=2, local_rank=0), "cpu", 10):
        pass


def test_a_world_is_asked_for(run, monkeypatch):
    with pytest.raises(Refused, match="ddp trains in processes of its own"):
        Trainer(recipe={**run, "parallel": "ddp"}).train()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refused, match=r"parallel\.processes: 4, and 2 were started"):
        Trainer(recipe={**run, "parallel": {"name": "ddp", "processes": 4}}).train()
    with pytest.raises(Refused, match=r"2 processes were started, and parallel=none trains in one; write parallel=ddp"):
        Trainer(recipe=run).train()
    monkeypatch.setenv("LOCAL_RANK", "1")
    for parallel in ("none", {"name": "ddp", "processes": 4}):
        with pytest.raises(SaidElsewhere):
            Trainer(recipe={**run, "parallel": parallel}).train()

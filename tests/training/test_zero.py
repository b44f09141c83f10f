"""Runs by DeepSpeed's ZeRO in several processes learn what one process learns, and go on in any other way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed import each_stage, needs_async_io, needs_deepspeed, zero
from tests.training.processes import in_processes, train, train_in
from tests.training.runs import final_weights
from tests.training.test_processes import assert_same, recorded
from tightfit.backends.pytorch.techniques.zero.engine import folder_on_drive
from tightfit.backends.pytorch.techniques.zero.update import ZeroUpdate
from tightfit.backends.pytorch.world import ALONE
from tightfit.errors import Refused
from tightfit.techniques import optimizer as optimizers

pytestmark = [pytest.mark.cold, needs_deepspeed, pytest.mark.usefixtures("deepspeed_loaded")]


@pytest.fixture
def run(tiny):
    """Ragged global batches and micro-batches, clipping that acts, evaluation on the way."""
    return {**tiny, "data": {"source": "dummy", "samples": 37}, "micro_batch_size": 3, "max_steps": 10,
            "max_grad_norm": 0.3, "save_steps": 5, "eval_steps": 5, "sample_prompt": None}  # fmt: skip


@each_stage
def test_two_processes_learn_what_one_learns(run, tmp_path, knobs):
    for size in (1, 2):
        train_in(size, {**run, "output_dir": str(tmp_path / str(size))}, zero(knobs))
    assert_same(tmp_path / "1", tmp_path / "2")
    assert max(recorded(tmp_path / "1", "grad_norm")) > run["max_grad_norm"]


@needs_async_io
def test_states_and_weights_may_wait_on_a_drive(run, tmp_path):
    """The first run compiles DeepSpeed's async_io, in minutes. What is smaller than 1 MiB stays in memory."""
    drive = tmp_path / "drive"
    drive.mkdir()
    run = {**run, "model_overrides": {**run["model_overrides"], "n_embd": 512}, "eval_steps": None}
    train_in(1, {**run, "output_dir": str(tmp_path / "1")})
    for steps in (5, 10):
        values = {**run, "max_steps": steps, "output_dir": str(tmp_path / "2"),
                  "parallel": zero({"stage": 3, "offload": "nvme", "nvme_path": str(drive)})}
        assert in_processes(2, train_looking, values, drive, tmp_path / "seen", limit=1800.0) == [0, 0]
    seen = (tmp_path / "seen").read_text()
    assert {kind for kind in ("param", "gradient", "exp_avg_sq") if kind in seen} == {"param", "gradient", "exp_avg_sq"}
    assert not any(drive.iterdir())
    one, two = tmp_path / "1", tmp_path / "2"
    assert recorded(two, "loss") == pytest.approx(recorded(one, "loss"), rel=1e-6)
    # torch's norm of a million numbers is off by a hundred-thousandth on a processor, and DeepSpeed's is not.
    assert recorded(two, "grad_norm") == pytest.approx(recorded(one, "grad_norm"), rel=2e-5)
    a, b = final_weights(one), final_weights(two)
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 1e-5


def train_looking(values: dict[str, Any], drive: Path, seen: Path) -> None:
    """Train, and note what lies on the drive when that is over."""
    close = ZeroUpdate.close

    def looking(update: ZeroUpdate) -> None:
        with seen.open("a") as file:
            file.writelines(f"{path.name}\n" for path in drive.rglob("*.swp"))
        close(update)

    ZeroUpdate.close = looking  # type: ignore[assignment, method-assign]
    train(values)


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(Refused, match=r"parallel\.nvme_path: .*nowhere is no folder"):
        folder_on_drive(ALONE, tmp_path / "nowhere")


@pytest.mark.parametrize("knobs", [{"stage": 2}, {"stage": 3}], ids=str)
def test_processes_without_a_sample_take_part(run, tmp_path, knobs):
    """Global batches of two, the last of an epoch of one, for three processes."""
    run = {**run, "data": {"source": "dummy", "samples": 5}, "batch_size": 2, "micro_batch_size": 1}
    for size in (1, 3):
        train_in(size, {**run, "output_dir": str(tmp_path / str(size))}, zero(knobs))
    assert_same(tmp_path / "1", tmp_path / "3")


@each_stage
def test_a_run_goes_on_with_another_number_of_processes_or_stage(run, tmp_path, knobs):
    assert_goes_on({**run, "eval_steps": None}, tmp_path, [(2, zero(knobs)), (3, zero(knobs)), (1, "none")])


@pytest.mark.parametrize("optimizer", [optimizers.Sgd.name, optimizers.Lion.name])
def test_states_of_other_optimizers_go_on(run, tmp_path, optimizer):
    run = {**run, "eval_steps": None, "optimizer": optimizer}
    assert_goes_on(run, tmp_path, [(1, "none"), (2, zero({"stage": 2})), (2, zero({"stage": 3})), (2, "ddp")])


def assert_goes_on(run, tmp_path, ways):
    train_in(1, {**run, "output_dir": str(tmp_path / "one")})
    for number, (size, parallel) in enumerate(ways):
        steps = run["max_steps"] - 2 * (len(ways) - 1 - number)
        train_in(size, {**run, "max_steps": steps, "output_dir": str(tmp_path / "several")}, parallel)
    assert recorded(tmp_path / "several", "loss") == pytest.approx(recorded(tmp_path / "one", "loss"), abs=2e-6)
    a, b = final_weights(tmp_path / "one"), final_weights(tmp_path / "several")
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 1e-5


def test_a_stopped_run_goes_on_bit_for_bit(run, tmp_path):
    overrides = {**run["model_overrides"], "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    run = {**run, "model_overrides": overrides, "eval_steps": None}
    train_in(2, {**run, "output_dir": str(tmp_path / "whole")}, zero({"stage": 3}))
    for steps in (5, 10):
        train_in(2, {**run, "max_steps": steps, "output_dir": str(tmp_path / "parts")}, zero({"stage": 3}))
    assert recorded(tmp_path / "parts", "loss") == recorded(tmp_path / "whole", "loss")

"""Runs by DeepSpeed's ZeRO in several processes learn what one process learns, and go on in any other way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed import each_stage, needs_async_io, needs_deepspeed, zero
from tests.training import processes as several
from tests.training.processes import in_processes, recorded, train, train_in
from tightfit.backends.pytorch.techniques.zero.engine import folder_on_drive
from tightfit.backends.pytorch.techniques.zero.update import ZeroUpdate
from tightfit.backends.pytorch.world import ALONE
from tightfit.errors import Refused
from tightfit.techniques import optimizer as optimizers

pytestmark = [pytest.mark.cold, needs_deepspeed, pytest.mark.usefixtures("deepspeed_loaded")]


@pytest.fixture
def run(tiny):
    return {**tiny, **several.RAGGED}


@each_stage
def test_two_processes_learn_what_one_learns(run, tmp_path, knobs):
    several.assert_sizes_learn_alike(run, tmp_path, zero(knobs))
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
    several.assert_near(one, two)


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
    several.assert_learns_without_samples(run, tmp_path, zero(knobs))


@each_stage
def test_a_run_goes_on_with_another_number_of_processes_or_stage(run, tmp_path, knobs):
    several.assert_goes_on(run, tmp_path, [(2, zero(knobs)), (3, zero(knobs)), (1, "none")])


@pytest.mark.parametrize("optimizer", [optimizers.Sgd.name, optimizers.Lion.name])
def test_states_of_other_optimizers_go_on(run, tmp_path, optimizer):
    ways = [(1, "none"), (2, zero({"stage": 2})), (2, zero({"stage": 3})), (2, "ddp")]
    several.assert_goes_on({**run, "optimizer": optimizer}, tmp_path, ways)


def test_a_stopped_run_goes_on_bit_for_bit(run, tmp_path):
    several.assert_goes_on_exactly(run, tmp_path, zero({"stage": 3}))

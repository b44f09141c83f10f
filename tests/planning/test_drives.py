"""What waits on a drive, and how long a measured one takes over it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tightfit import planner
from tightfit.devices import find_device
from tightfit.doctor import machine
from tightfit.doctor.readings import Disk
from tightfit.planning.cluster import Cluster
from tightfit.planning.drives import DriveBytes, drive_bytes, moves_of
from tightfit.recipe import Recipe
from tightfit.techniques.parallel import Zero

ZERO = Zero(stage=3, offload="nvme", nvme_path="/mnt/nvme", processes=2)
RECIPE = Recipe.from_dict({"batch_size": 8, "micro_batch_size": 2, "optimizer": "adamw", "precision": "fp32"})


def test_bytes_of_a_parameter():
    """Weights, their copy, two states, gradients; two micro-batches a process gather weights four times."""
    assert drive_bytes(RECIPE, ZERO, 10) == DriveBytes(held=200, in_memory=40, read=4 * 40 + 160, written=200)
    assert moves_of(RECIPE.model_copy(update={"parallel": ZERO}), 200) == drive_bytes(RECIPE, ZERO, 10)


@pytest.mark.parametrize(("speed", "said"), [
    (1e6, "8.7 min at the 1 and 1 MB/s measured"),  # 320 million bytes read, 200 written
    (None, "could not be measured (full)"),
])  # fmt: skip
def test_a_plan_says_how_long_the_drive_at_hand_takes(monkeypatch, tmp_path, speed, said):
    disk = Disk(folder=str(tmp_path), read=speed, write=speed, error=None if speed else "full")
    monkeypatch.setattr(machine, "read_disk", lambda folder: disk)
    (note,) = planner._drive_notes(plan_of(str(tmp_path)))
    assert said in note


def test_a_drive_elsewhere_is_left_to_the_doctor():
    (note,) = planner._drive_notes(plan_of("/mnt/nowhere"))
    assert "/mnt/nowhere is not here: tightfit doctor" in note
    assert planner._drive_notes(plan_of(None)) == []


def plan_of(path: str | None) -> SimpleNamespace:
    """A plan whose two processes have 10 million parameters on a drive."""
    parallel = {"name": "zero", "stage": 3, "processes": 2}
    if path is not None:
        parallel |= {"offload": "nvme", "nvme_path": path}
    estimate = SimpleNamespace(memory=SimpleNamespace(drive=100_000_000), time=SimpleNamespace(step_seconds=1.0))
    chosen = SimpleNamespace(recipe=RECIPE.override(parallel=parallel), estimate=estimate)
    return SimpleNamespace(chosen=chosen, device=Cluster(cards=2).on(find_device("rtx-3090")))

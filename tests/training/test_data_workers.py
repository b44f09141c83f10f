"""Data workers raised where steps wait for their global batches."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.training.runs import Said
from tightfit import Trainer
from tightfit.errors import LostProcess
from tightfit.training.data_workers import SEEN_STEPS, DataWorkers


def after(workers: DataWorkers, waited: float, seconds: float, steps: int) -> float:
    """The share of waiting for which the number is raised after so many steps alike."""
    share = 0.0
    for _ in range(steps):
        workers.add(waited, seconds)
        share = share or workers.raised()
    return share


@pytest.mark.parametrize(("waited", "seconds", "number"), [
    (0.1, 0.15, 2),  # 100 ms a batch, in 50 ms of computing
    (0.3, 0.34, 7),  # as many as there may be
    (0.001, 0.002, 0),  # handing over would take as long
    (0.006, 0.2, 0),  # a share that is not worth a process
])
def test_what_is_prepared_in_the_run_itself_goes_to_as_many_as_keep_up(waited, seconds, number):
    workers = DataWorkers(0, 2, most=7)
    assert after(workers, waited, seconds, SEEN_STEPS + 1) == pytest.approx(waited / seconds if number else 0.0)
    assert workers.number == number


def test_workers_that_are_still_too_slow_are_raised_again_until_they_suffice():
    workers = DataWorkers(2, 2, most=16)
    assert after(workers, 0.05, 0.1, 2 * SEEN_STEPS + 4) == 0.0  # what was made ahead of the first steps tells nothing
    assert after(workers, 0.05, 0.1, 1) == pytest.approx(0.5)
    assert workers.number == 4
    assert after(workers, 0.0, 0.05, 8 * SEEN_STEPS) == 0.0
    assert after(workers, 0.05, 0.1, 8 * SEEN_STEPS) == 0.0  # it is not looked at again


class Slow:
    """Samples that each take a while, and say which process made them."""

    def __init__(self, folder) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        time.sleep(0.004)
        (self.folder / str(os.getpid())).touch()
        return {"input_ids": [(index + place) % 50 for place in range(16)]}


def test_a_run_that_waits_for_data_takes_workers_and_learns_the_same(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr("tightfit.training.data_workers.cores", lambda: 3)
    told = Said()

    def losses(name: str, **loading: int) -> tuple[float, ...]:
        (tmp_path / name).mkdir()
        recipe = {**tiny, "max_steps": SEEN_STEPS + 6, "batch_size": 8, "seq_len": 16, "loading": loading,
                  "data": {"packing": False}, "output_dir": str(tmp_path / f"{name}.run"), "eval_steps": None}
        return Trainer(recipe=recipe, dataset=Slow(tmp_path / name), listener=told).train().losses

    assert losses("alone", workers=0) == losses("open")
    assert len(list((tmp_path / "alone").iterdir())) == 1
    assert len(list((tmp_path / "open").iterdir())) > 1
    said = [text for text in told.texts if "waiting for data" in text]
    assert [f"from step {SEEN_STEPS + 2} on loading.workers=" in text for text in said] == [True]


@pytest.mark.parametrize(("workers", "notes"), [(3, 1), (1, 0), ("auto", 0)])
def test_more_workers_than_cores_are_noted_once(tmp_path, tiny, monkeypatch, workers, notes):
    monkeypatch.setattr("tightfit.training.session.cores", lambda: 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)  # which torch asks, whose warning fails
    told = Said()
    recipe = {**tiny, "max_steps": 2, "loading": {"workers": workers}, "output_dir": str(tmp_path / "run")}
    Trainer(recipe=recipe, listener=told).train()
    said = [text for text in told.texts if text.startswith("note: loading.workers")]
    assert said == ["note: loading.workers: 3 processes share this machine's 1 core; write loading.workers=auto for as "
                    "many as keep steps from waiting"] * notes


class Killed:
    """Rows whose worker is killed, as the system does where memory is full."""

    def __init__(self, folder) -> None:
        self.trainer, self.folder = os.getpid(), folder

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if os.getpid() != self.trainer and len(list(self.folder.iterdir())) > 40:
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        return {"input_ids": [(index + place) % 50 for place in range(16)]}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed_is_told(tmp_path, tiny, workers):
    rows = Killed(tmp_path / "made")
    rows.folder.mkdir()
    recipe = {**tiny, "max_steps": 40, "batch_size": 8, "seq_len": 16, "loading": {"workers": workers},
              "data": {"packing": False}, "output_dir": str(tmp_path / "run"), "eval_steps": None}
    with pytest.raises(LostProcess, match=r"loading\.workers: .* was killed, .* with loading\.workers=0"):
        Trainer(recipe=recipe, dataset=rows).train()

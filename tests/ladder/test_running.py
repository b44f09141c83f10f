"""Climbing: rungs that run, fail and are skipped; results that are gone on with. Processes are real where they matter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ladder.test_rows import MACHINE
from tightfit.errors import RecipeError, ReportError
from tightfit.ladder import running
from tightfit.ladder.catalogue import find_ladder
from tightfit.ladder.lines import differs, lines
from tightfit.ladder.rows import Machine, Predicted, append
from tightfit.ladder.running import Asked, Climb, climb

Outcomes = Callable[[dict[str, Any]], dict[str, Any]]
DONE = {"status": "done", "seconds": [0.2, 0.1, 0.3], "losses": [0.7, 0.6, 0.5, 0.4, 0.3], "samples": 4,
        "tokens": 512, "peak_allocated": 100, "peak_reserved": 200, "context": None}  # fmt: skip


class Processes:
    """Stands in for the processes: what each job comes to, and which were asked for."""

    def __init__(self, outcome: Outcomes, machine: Machine = MACHINE) -> None:
        self.outcome, self.machine, self.jobs = outcome, machine, list[dict[str, Any]]()

    def __call__(self, job: dict[str, Any], limit: float, launch: str = "single") -> dict[str, Any]:
        if job["job"] == "about":
            return {"machine": asdict(self.machine)}
        if job["job"] == "predict":
            for rung in job["rungs"]:
                append(Path(job["results"]), Predicted(**{**rung["row"], "fits": "yes", "peak_reserved": 190}))
            return {"status": "done"}
        self.jobs.append(job)
        return self.outcome(job)

    def ran(self) -> int:
        count = len(self.jobs)
        self.jobs.clear()
        return count


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Processes]:
    def use(outcome: Outcomes, machine: Machine = MACHINE) -> Processes:
        made = Processes(outcome, machine)
        monkeypatch.setattr(running, "_job", made)
        return made

    return use


def asked(folder: Path, **changes: Any) -> Asked:
    values = {"ladder": find_ladder("bert-large"), "scale": "smallest", "folder": folder, "warm_up": 1, "steps": 3}
    return Asked(**{**values, **changes})


def go(folder: Path, **changes: Any) -> Climb:
    return climb(asked(folder, **changes), lambda text: None)


def test_every_rung_becomes_a_row(tmp_path: Path, processes: Callable[..., Processes]) -> None:
    processes(lambda job: DONE)
    done = go(tmp_path)
    shown = lines(done)
    assert [line.rung for line in shown] == list(find_ladder("bert-large").rungs)
    assert all(line.measured is not None and line.measured.median_seconds == 0.2 for line in shown)
    assert all(line.predicted is not None and line.predicted.peak_reserved == 190 for line in shown)
    assert (shown[0].speed, shown[1].speed, shown[1].memory) == (None, 1.0, 1.0)


def test_a_ladder_goes_on_where_it_stopped(tmp_path: Path, processes: Callable[..., Processes]) -> None:
    rungs = len(find_ladder("bert-large").rungs)

    def interrupted(job: dict[str, Any]) -> dict[str, Any]:
        if job["recipe"]["precision"] == "fp16":
            raise KeyboardInterrupt
        return DONE

    made = processes(interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path)
    assert made.ran() == 4
    made = processes(lambda job: DONE)
    go(tmp_path)
    assert made.ran() == rungs - 3
    go(tmp_path)
    assert made.ran() == 0
    go(tmp_path, steps=4)
    assert made.ran() == rungs  # another measurement


def test_what_did_not_run_is_a_row_with_its_reason(tmp_path: Path, processes: Callable[..., Processes]) -> None:
    words = iter(["out-of-memory", "refused", "timed-out", "failed"])

    def outcome(job: dict[str, Any]) -> dict[str, Any]:
        word = next(words, None)
        return DONE if word is None else {"status": word, "reason": f"because {word}"}

    made = processes(outcome)
    shown = lines(go(tmp_path, limit=10.0))
    assert [line.measured.status for line in shown[:5] if line.measured] == [
        "out-of-memory", "refused", "timed-out", "failed", "done"]  # fmt: skip
    assert shown[0].measured is not None
    assert shown[0].measured.reason == "because out-of-memory"
    assert shown[4].speed is None  # its baseline did not run
    made.ran()
    go(tmp_path, limit=10.0)
    assert made.ran() == 1  # what failed is tried again
    go(tmp_path, limit=20.0)
    assert made.ran() == 1  # what took too long, with more time


def test_another_machines_rows_are_not_taken_for_this_ones(
    tmp_path: Path, processes: Callable[..., Processes]
) -> None:
    from tightfit.ladder.lines import heading

    made = processes(lambda job: DONE)
    go(tmp_path)
    made = processes(lambda job: {**DONE, "samples": 8}, replace(MACHINE, device="NVIDIA T4", kind="cuda"))
    done = go(tmp_path)
    assert made.ran() == len(find_ladder("bert-large").rungs)
    assert {line.measured.samples for line in lines(done) if line.measured} == {8}
    assert any("also hold rows of CPU" in sentence for sentence in heading(done))


def test_a_peer_is_the_same_work_or_says_that_it_is_not(tmp_path: Path, processes: Callable[..., Processes]) -> None:
    losses = {"tightfit": [0.7] * 5, "plain": [0.7, 0.7, 0.7, 0.7001, 0.7], "hf-trainer": [0.7, 0.7, 0.9, 0.7, 0.7]}
    processes(lambda job: {**DONE, "losses": losses[job["runner"]]})
    shown = lines(go(tmp_path, runners=("tightfit", "plain", "hf-trainer")))
    assert [line.runner for line in shown[:3]] == ["tightfit", "plain", "hf-trainer"]
    assert shown[1].same_work == ""
    assert shown[1].speed == 1.0
    assert shown[2].same_work == "not the same work: at step 3 its loss is 0.9000, ours 0.7000"
    assert shown[0].measured is not None
    assert shown[2].measured is not None
    short = replace(shown[2].measured, losses=(0.7,))
    assert "1 steps, ours 5" in differs(shown[0].measured, short)


def test_a_wrong_override_is_said_before_anything_runs(tmp_path: Path, processes: Callable[..., Processes]) -> None:
    made = processes(lambda job: DONE)
    with pytest.raises(RecipeError, match="seq_length"):
        go(tmp_path, overrides=["seq_length=8"])
    assert made.ran() == 0
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, processes: Callable[..., Processes]
) -> None:
    processes(lambda job: DONE)
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match="output_dir"):
        go(tmp_path / "file")


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A worker of a few lines, in the place of the real one."""

    def write(source: str) -> None:
        (tmp_path / "small_worker.py").write_text(source)
        monkeypatch.setattr(running, "WORKER", "small_worker")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


@pytest.mark.parametrize(("source", "status", "reason"), [
    ("import time; time.sleep(60)", "timed-out", "more than 1 seconds"),
    ("raise ValueError('no such thing')", "failed", "ValueError: no such thing (ended with status 1)"),
    ("import os; os.kill(os.getpid(), 9)", "out-of-memory", "host memory"),
    ("import os; os.kill(os.getpid(), 11)", "failed", "ended by SIGSEGV"),
    ("import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('{\"status\": \"done\"}')", "done", ""),
])  # fmt: skip
def test_a_process_comes_to_an_outcome(
    worker: Callable[[str], None], source: str, status: str, reason: str
) -> None:
    worker(source)
    found = running._job({}, 1.0 if status == "timed-out" else 30.0)
    assert found["status"] == status
    assert reason in found.get("reason", "")


CHILD = """
import pathlib, subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path({path!r}).write_text(str(started.pid))
time.sleep(60)
"""


def test_what_a_process_started_ends_with_it(worker: Callable[[str], None], tmp_path: Path) -> None:
    path = tmp_path / "pid"
    worker(CHILD.format(path=str(path)))
    assert running._job({}, 2.0)["status"] == "timed-out"
    assert _gone(int(path.read_text()))


def test_stopped_by_a_signal_nothing_is_left_running(worker: Callable[[str], None], tmp_path: Path) -> None:
    path = tmp_path / "pid"
    worker(CHILD.format(path=str(path)))
    ladder = subprocess.Popen([sys.executable, "-c", "from tightfit.ladder import running as r; "
                               "r.WORKER = 'small_worker'; r._job({}, 60.0)"])
    _until(lambda: path.exists() and path.read_text() != "")
    ladder.send_signal(signal.SIGTERM)
    assert ladder.wait(20) == 128 + signal.SIGTERM
    assert _gone(int(path.read_text()))


def test_killed_the_ladder_takes_its_worker_along(tmp_path: Path) -> None:
    from tightfit.ladder import worker as real

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"job": "about", "parent": child.pid}))
    source = (f"import time; from tightfit.ladder import worker as w; w.JOBS['about'] = lambda asked: time.sleep(60); "
              f"w.main(__import__('pathlib').Path({str(job)!r}), None)")
    waits = subprocess.Popen([sys.executable, "-c", source], env={**os.environ})
    time.sleep(0.1)
    child.kill()
    child.wait()
    assert waits.wait(60) == real.ORPHANED


def _gone(pid: int) -> bool:
    try:
        _until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    return True


def _until(reached: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)

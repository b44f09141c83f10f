"""Jobs in processes of their own: real ones, that come to an outcome, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tightfit.ladder import jobs
from tightfit.ladder.jobs import Job, Outcome, ended, run_jobs, without_outcome
from tightfit.system import ORPHANED_STATUS

JOB = Job(kind="machine", recipe={})


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A worker of a few lines, in the place of the real one."""

    def write(source: str) -> None:
        (tmp_path / "small_worker.py").write_text(source)
        monkeypatch.setattr(jobs, "WORKER", "small_worker")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    return write


@pytest.mark.parametrize(("source", "status", "reason"), [
    ("import time; time.sleep(60)", "timed-out", "more than 1 seconds"),
    ("raise ValueError('no such thing')", "failed", "ValueError: no such thing (ended with status 1)"),
    ("import os; os.kill(os.getpid(), 9)", "killed", "killed by signal 9, perhaps by the system"),
    ("import os; os.kill(os.getpid(), 11)", "failed", "ended by SIGSEGV"),
    ("import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('{\"status\": \"done\"}\\n')", "done", ""),
])  # fmt: skip
def test_a_process_comes_to_an_outcome(
    worker: Callable[[str], None], source: str, status: str, reason: str
) -> None:
    worker(source)
    (found,) = run_jobs([JOB], 1.0 if status == "timed-out" else 30.0)
    assert found.status == status
    assert reason in found.reason


CHILD = """
import pathlib, subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path({path!r}).write_text(str(started.pid))
time.sleep(60)
"""


def test_what_a_process_started_ends_with_it(worker: Callable[[str], None], tmp_path: Path) -> None:
    path = tmp_path / "pid"
    worker(CHILD.format(path=str(path)))
    (found,) = run_jobs([JOB], 2.0)
    assert found.status == "timed-out"
    until_gone(int(path.read_text()))


def test_interrupted_nothing_is_left_running(worker: Callable[[str], None], tmp_path: Path) -> None:
    path = tmp_path / "pid"
    worker(CHILD.format(path=str(path)))
    # a shell's background processes ignore the signal, and so do theirs
    ladder = subprocess.Popen([sys.executable, "-c", "import signal; from tightfit.ladder import jobs; "
                               "signal.signal(signal.SIGINT, signal.default_int_handler); "
                               "jobs.WORKER = 'small_worker'; "
                               "list(jobs.run_jobs([jobs.Job(kind='machine', recipe={})], 60.0))"],
                              stderr=subprocess.DEVNULL)
    until(lambda: path.exists() and path.read_text() != "")
    ladder.send_signal(signal.SIGINT)
    assert ladder.wait(20) != 0
    until_gone(int(path.read_text()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_the_ladder_takes_its_worker_along(tmp_path: Path, number: signal.Signals) -> None:
    ladder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    asked = tmp_path / "jobs"
    asked.write_text(JOB.model_dump_json())
    source = (f"import pathlib, time; from tightfit.ladder import worker; "
              f"worker.KINDS['machine'] = lambda job: time.sleep(60); "
              f"worker.main(pathlib.Path({str(asked)!r}), None, {ladder.pid})")
    waits = subprocess.Popen([sys.executable, "-c", source])
    time.sleep(0.1)
    ladder.send_signal(number)
    ladder.wait()
    assert waits.wait(60) == ORPHANED_STATUS


ONE_AFTER_THE_OTHER = """
import pathlib, sys, time
with pathlib.Path(sys.argv[2]).open("a") as file:
    for reason in ("first", "second", "third"):
        print('{{"status": "refused", "reason": "%s"}}' % reason, file=file, flush=True)
        {then}
"""


def test_each_job_has_the_limit_to_itself(worker: Callable[[str], None]) -> None:
    worker(ONE_AFTER_THE_OTHER.format(then="time.sleep(0.8)"))
    assert [found.reason for found in run_jobs([JOB] * 3, 1.5)] == ["first", "second", "third"]
    worker(ONE_AFTER_THE_OTHER.format(then="time.sleep(0.8 if reason == 'first' else 60)"))
    assert [found.status for found in run_jobs([JOB] * 3, 1.5)] == ["refused", "refused", "timed-out"]


def test_a_process_that_dies_leaves_what_it_had_done(worker: Callable[[str], None]) -> None:
    worker(ONE_AFTER_THE_OTHER.format(then="assert reason != 'second', 'no more'"))
    *kept, last = run_jobs([JOB] * 4, 30.0)
    assert [found.reason for found in kept] == ["first", "second"]
    assert last == Outcome(status="failed", reason="AssertionError: no more (ended with status 1)")


OWN_SESSION = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_processes_with_sessions_of_their_own_are_ended_too(tmp_path: Path):
    process: Any = subprocess.Popen([sys.executable, "-c", OWN_SESSION], stdout=subprocess.PIPE, start_new_session=True)
    with process.stdout, ended(process):
        child = int(process.stdout.readline())
        assert not gone(child)
    until_gone(child)


def test_a_process_is_ended_where_there_are_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "killpg")
    process: Any = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    began = time.monotonic()
    with ended(process):
        pass
    assert (gone(process.pid), time.monotonic() - began < 30) == (True, True)


REPORT = """Traceback (most recent call last):
KeyError: 'what went wrong'
E1121 16:22:29.252000 30109 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def test_torchruns_report_is_left_out_of_what_processes_say():
    assert without_outcome(1, "one\ntwo").reason.startswith("two (")
    assert without_outcome(1, REPORT.format(code=1)).reason.startswith("KeyError: 'what went wrong' (")
    assert without_outcome(1, REPORT.format(code=-9)).status == "killed"


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until_gone(pid: int) -> None:
    until(lambda: gone(pid))


def until(reached: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""Jobs in processes of their own: real ones, that come to an outcome, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from tightfit.ladder import jobs, processes
from tightfit.ladder.parallel import own_words
from tightfit.ladder.processes import ended, run_job, without_outcome
from tightfit.ladder.worker import ORPHANED

JOB = jobs.About(recipe={})


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A worker of a few lines, in the place of the real one."""

    def write(source: str) -> None:
        (tmp_path / "small_worker.py").write_text(source)
        monkeypatch.setattr(processes, "WORKER", "small_worker")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    return write


@pytest.mark.parametrize(("source", "status", "reason"), [
    ("import time; time.sleep(60)", "timed-out", "more than 1 seconds"),
    ("raise ValueError('no such thing')", "failed", "ValueError: no such thing (ended with status 1)"),
    ("import os; os.kill(os.getpid(), 9)", "killed", "killed by signal 9, perhaps by the system"),
    ("import os; os.kill(os.getpid(), 11)", "failed", "ended by SIGSEGV"),
    ("import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('{\"status\": \"done\"}')", "done", ""),
])  # fmt: skip
def test_a_process_comes_to_an_outcome(
    worker: Callable[[str], None], source: str, status: str, reason: str
) -> None:
    worker(source)
    found = run_job(JOB, 1.0 if status == "timed-out" else 30.0)
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
    assert run_job(JOB, 2.0).status == "timed-out"
    until_gone(int(path.read_text()))


def test_stopped_by_a_signal_nothing_is_left_running(worker: Callable[[str], None], tmp_path: Path) -> None:
    path = tmp_path / "pid"
    worker(CHILD.format(path=str(path)))
    ladder = subprocess.Popen([sys.executable, "-c", "from tightfit.ladder import jobs, processes; "
                               "processes.WORKER = 'small_worker'; processes.run_job(jobs.About(recipe={}), 60.0)"])
    until(lambda: path.exists() and path.read_text() != "")
    ladder.send_signal(signal.SIGTERM)
    assert ladder.wait(20) == 128 + signal.SIGTERM
    until_gone(int(path.read_text()))


def test_killed_the_ladder_takes_its_worker_along(tmp_path: Path) -> None:
    ladder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    job = tmp_path / "job.json"
    job.write_bytes(jobs.JOB.dump_json(JOB))
    source = (f"import pathlib, time; from tightfit.ladder import jobs, worker; "
              f"worker.JOBS[jobs.About] = lambda asked: time.sleep(60); "
              f"worker.main(pathlib.Path({str(job)!r}), None, {ladder.pid})")
    waits = subprocess.Popen([sys.executable, "-c", source])
    time.sleep(0.1)
    ladder.kill()
    ladder.wait()
    assert waits.wait(60) == ORPHANED


HOLDS_THE_LOCK = """
import ctypes, os, pathlib, sys
from tightfit.ladder import worker
worker.end_with_starter(int(sys.argv[3]))
pathlib.Path({path!r}).write_text(str(os.getpid()))
ctypes.PyDLL(None).sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot be asked to end a process with another")
def test_a_worker_that_runs_no_python_ends_with_its_ladder_too(
    worker: Callable[[str], None], tmp_path: Path
) -> None:
    path = tmp_path / "pid"
    worker(HOLDS_THE_LOCK.format(path=str(path)))
    ladder = subprocess.Popen([sys.executable, "-c", "from tightfit.ladder import jobs, processes; "
                               "processes.WORKER = 'small_worker'; processes.run_job(jobs.About(recipe={}), 600.0)"])
    until(lambda: path.exists() and path.read_text() != "")
    ladder.kill()
    ladder.wait()
    until_gone(int(path.read_text()))


def test_a_job_that_comes_on_has_its_limit_anew(worker: Callable[[str], None]) -> None:
    worker("import sys, pathlib, time; time.sleep(2.5); "
           "pathlib.Path(sys.argv[2]).write_text('{\"status\": \"done\"}')")
    assert run_job(JOB, 1.0, partial(next, count())).status == "done"
    assert run_job(JOB, 1.0, lambda: 0).status == "timed-out"
    assert run_job(JOB, 60.0, partial(next, count()), until=time.monotonic() + 0.1).status == "timed-out"


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


REPORT = """Traceback (most recent call last):
KeyError: 'what went wrong'
E1121 16:22:29.252000 30109 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def test_what_processes_say_is_told_from_torchruns_report():
    assert own_words("one\ntwo") == ("one\ntwo", False)
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

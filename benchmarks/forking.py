"""Work done in processes forked from this one: they share what is imported here, and nothing that they do.

A child may make a CUDA context, run out of memory, crash or hang; the parent stays as it was. It has no threads and
no CUDA context, which would not survive a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.02
SAID = 1500
"""How much of a failed child's last words is kept, in characters."""


@dataclass(frozen=True)
class Job:
    """A piece of work. work: returns what JSON can hold. seconds: it is ended after so many."""

    name: str
    work: Callable[[], Any]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What became of a job. value: what it returned. failure: what it said where it did not return; else None."""

    name: str
    value: Any
    failure: str | None
    seconds: float


def run_forked(jobs: Iterable[Job], at_once: int = 1, deadline: float | None = None) -> Iterator[Outcome]:
    """The jobs' outcomes, each as it ends.

    at_once: jobs that run at the same time. deadline: of `time.monotonic`; jobs that run then are ended, and have no
        outcome, as those that were not begun.
    """
    waiting, running = iter(jobs), list[_Child]()
    more = True
    try:
        while more or running:
            if deadline is not None and time.monotonic() >= deadline:
                return
            while more and len(running) < at_once:
                job = next(waiting, None)
                if job is None:
                    more = False
                else:
                    running.append(_Child(job))
            for child in list(running):
                outcome = child.outcome()
                if outcome is not None:
                    running.remove(child)
                    yield outcome
            time.sleep(POLL_SECONDS if running else 0)
    finally:
        for child in running:
            child.end()


class _Child:
    def __init__(self, job: Job) -> None:
        self.job = job
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        self._began = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # numpy's pool of threads, which handles forks, is enough for Python 3.12 to warn.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = os.fork()
        if self._process == 0:
            _work(job.work, Path(self._folder.name))

    def outcome(self) -> Outcome | None:
        """None while it runs."""
        ended, status = os.waitpid(self._process, os.WNOHANG)
        seconds = time.monotonic() - self._began
        if not ended and seconds < self.job.seconds:
            return None
        value: Any = None
        failure: str | None = f"took more than {self.job.seconds:.0f} seconds"
        path = Path(self._folder.name)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            said = (path / "said").read_text(errors="replace")[-SAID:].strip()
            value = json.loads((path / "value").read_text()) if code == 0 else None
            failure = None if code == 0 else said or _reason(code)
        self.end(reap=not ended)
        return Outcome(self.job.name, value, failure, seconds)

    def end(self, reap: bool = True) -> None:
        """End it and the processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process, signal.SIGKILL)
        if reap:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
        self._folder.cleanup()


def _work(work: Callable[[], Any], folder: Path) -> None:
    """The child's whole life."""
    code = 1
    try:
        os.setsid()  # what it starts ends with it
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(said, 1)
        os.dup2(said, 2)
        (folder / "value").write_text(json.dumps(work()))
        code = 0
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _reason(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

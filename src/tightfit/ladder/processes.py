"""A job in a process of its own, with a time limit; whatever becomes of it, what it started is ended with it.

A process of its own session is ended too, but not one whose starter has left it before: nothing tells whose that is.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import psutil

from tightfit.ladder.jobs import JOB, OUTCOME, Job, Measure, Outcome
from tightfit.ladder.parallel import command, own_words

WORKER = "tightfit.ladder.worker"
POLL = 0.5
"""Seconds between two looks at how far a job is."""
SAID = 400
"""Characters of a failed process's last words that are kept."""


def run_job(
    job: Job, limit: float, progress: Callable[[], int] | None = None, until: float | None = None
) -> Outcome:
    """A job's outcome; of a process that ends without one, why. Being asked to stop ends the process first.

    limit: seconds that it may take; with `progress`, that may pass from one change of what this returns to the next.
    until: a moment of time.monotonic at which it ends whatever it has left.
    """
    with stopping(), tempfile.TemporaryDirectory(prefix="tightfit-ladder-") as folder:
        asked, outcome, said = (Path(folder) / name for name in ("job.json", "outcome.json", "said"))
        asked.write_bytes(JOB.dump_json(job))
        words, more = command(job.launch if isinstance(job, Measure) else "single",
                              [WORKER, str(asked), str(outcome), str(os.getpid())])
        with said.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=output, env={**os.environ, **more},
                                       stdin=subprocess.DEVNULL, start_new_session=True)
            with ended(process):
                try:
                    code = _waited(process, limit, progress or (lambda: 0), until)
                except subprocess.TimeoutExpired:
                    return Outcome(status="timed-out", reason=f"took more than {limit:.0f} seconds")
        if outcome.exists():
            return OUTCOME.validate_json(outcome.read_bytes())
        return without_outcome(code, said.read_text("utf-8", errors="replace"))


def _waited(process: subprocess.Popen[bytes], limit: float, progress: Callable[[], int], until: float | None) -> int:
    """A process's exit status. Raises TimeoutExpired; for the arguments see `run_job`."""
    end = math.inf if until is None else until
    done, deadline = progress(), time.monotonic() + limit
    while True:
        try:
            return process.wait(max(min(POLL, deadline - time.monotonic(), end - time.monotonic()), 0.0))
        except subprocess.TimeoutExpired:
            if (now := progress()) != done:
                done, deadline = now, time.monotonic() + limit
            if time.monotonic() >= min(deadline, end):
                raise


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """In the end a process is gone, with those that descend from it: torchrun's processes lead groups of their own."""
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """SIGTERM and a terminal that closes unwind this process, so that it ends what it started."""
    if threading.current_thread() is not threading.main_thread():  # where Python allows no handlers
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    asked = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in asked}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def without_outcome(code: int, said: str) -> Outcome:
    """What is known of a process that wrote no outcome, by its exit status and all that it said."""
    said, killed = own_words(said)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "Error" in line or "error" in line), lines[-1] if lines else "")
    if killed or code == -signal.SIGKILL:
        return Outcome(status="killed",
                       reason=f"killed by signal {signal.SIGKILL:d}, perhaps by the system for lack of host memory")
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return Outcome(status="failed", reason=f"{last[-SAID:]} ({how})" if last else how)

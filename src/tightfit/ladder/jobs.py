"""Jobs in a process of their own, with a time limit; whatever becomes of it, what it started is ended with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel

from tightfit.errors import last_words
from tightfit.ladder.rows import OURS, Status
from tightfit.ladder.rungs import DEVICES, Launch
from tightfit.system import KILLED_STATUS

WORKER = "tightfit.ladder.worker"
POLL_SECONDS = 0.2
"""Seconds between two looks at what a process has written."""
ENDING_SECONDS = 30.0
"""Seconds that a process may take to end once its last job is done."""


class Job(BaseModel, frozen=True):
    """A job for a process: to say what this machine is, with the model and the data that all rungs share, to measure a
    rung or to predict one.

    recipe, within: as `Recipe.to_dict` writes them; within: whose memory a growing rung keeps to.
    memory: bytes that this machine's device is cut down to.
    runner, launch, warm_up, steps: of a measurement. gpu: to predict for; None for this machine's own device.
    """

    kind: Literal["machine", "measure", "predict"]
    recipe: dict[str, Any]
    within: dict[str, Any] | None = None
    memory: int | None = None
    runner: str = OURS
    launch: Launch = "single"
    warm_up: int = 0
    steps: int = 0
    gpu: str | None = None


class Outcome(BaseModel, frozen=True):
    """A job's outcome. reason: a sentence, where it is not done. values: fields of a row, or of the machine."""

    status: Status = "done"
    reason: str = ""
    values: Mapping[str, Any] = {}


def run_jobs(jobs: Sequence[Job], limit: float) -> Iterator[Outcome]:
    """Each job's outcome as it comes, all from one process. The outcome of a job that ends or outlasts the process is
    the last.

    jobs: of one launch. limit: seconds for each, the process's start within the first.
    """
    with tempfile.TemporaryDirectory(prefix="tightfit-ladder-") as folder:
        asked, written, said = (Path(folder) / name for name in ("jobs", "outcomes", "said"))
        asked.write_text("\n".join(job.model_dump_json() for job in jobs), "utf-8")
        written.touch()
        words, more = command(jobs[0].launch, [WORKER, str(asked), str(written), str(os.getpid())])
        with (
            said.open("wb") as output,
            ended(subprocess.Popen(words, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                                   env={**os.environ, **more}, start_new_session=True)) as process,
        ):  # fmt: skip
            for number in range(len(jobs)):
                found = _outcome(process, written, number, limit)
                if found is None:
                    yield without_outcome(process.wait(), said.read_text("utf-8", errors="replace"))
                    return
                yield found
                if found.status == "timed-out":
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)


def command(launch: Launch, worker: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command that starts a job's processes, and variables for their environment. worker: the module and its
    arguments."""
    environment = {"NCCL_P2P_DISABLE": "1"} if launch == "ddp-no-p2p" else {}
    if launch == "dp":  # which would take all GPUs there are
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:DEVICES]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(first)}
    if launch in ("single", "dp"):
        return [sys.executable, "-m", *worker], environment
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={DEVICES}",
                "--module"]
    return [*torchrun, *worker], environment


def _outcome(process: subprocess.Popen[bytes], written: Path, number: int, limit: float) -> Outcome | None:
    """The outcome of that number, once it is written; None of a process that ended without it."""
    deadline = time.monotonic() + limit
    while True:
        over = process.poll() is not None  # asked before reading: what it wrote before its end counts
        lines = written.read_bytes().split(b"\n")[:-1]
        if len(lines) > number:
            return Outcome.model_validate_json(lines[number])
        if over:
            return None
        if time.monotonic() >= deadline:
            return Outcome(status="timed-out", reason=f"took more than {limit:.0f} seconds")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """In the end a process is gone, with its descendants: torchrun's processes lead groups of their own."""
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):  # no groups on Windows
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def without_outcome(code: int, said: str) -> Outcome:
    """The outcome of a process that wrote none, by its exit status and all that it said."""
    before, torchrun, report = said.partition("torch/distributed/elastic/")
    killed = "(exitcode: -9)" in report
    own = before.rpartition("\n")[0] if torchrun else said
    if killed or code == KILLED_STATUS:
        return Outcome(status="killed",
                       reason=f"killed by signal {-KILLED_STATUS}, perhaps by the system for lack of host memory")
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return Outcome(status="failed", reason=f"{last} ({how})" if (last := last_words(own)) else how)

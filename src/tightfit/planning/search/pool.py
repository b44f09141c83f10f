"""Evaluating recipes side by side, in processes of their own: tracing is Python, of which a process runs one at a time.

The processes are started as `python -m tightfit.planning.search.pool`, not forked: torch's and XLA's threads do not
survive a fork. Nor does multiprocessing start them, which would run the caller's script again in each.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar

from tightfit.calibration import Calibration
from tightfit.garbage import gc_paused
from tightfit.planning.estimate import Tools
from tightfit.planning.search.evaluate import InProcess, Job, Outcome, trace_key
from tightfit.system import POSIX, cores

Answer = TypeVar("Answer")
MOST_PROCESSES = 4
"""Recipes evaluated at once, at most: each process takes a core and up to 2 GB."""
WORTHWHILE_SECONDS = 0.7
"""Processor seconds that a recipe takes from which on a process of its own pays, which imports for about five."""
JOBS_TO_COLLECTION = 16
"""Jobs after which a process looks through all that it holds for garbage."""


class Pool:
    """An `Evaluator`: this process, and others beside it once a recipe has proved to take long.

    A recipe goes where it was traced before, for another GPU or another way of the allocator needs no new trace.
    Use it as a context manager; its end ends the processes.
    """

    def __init__(self, tools: Tools, backend: str, calibration: Calibration | None = None) -> None:
        self.side_by_side = max(min(cores(), MOST_PROCESSES), 1) if POSIX else 1  # Windows lets none inherit a pipe
        self._own = InProcess(tools)
        self._greeting = (list(sys.path), backend, calibration)
        self._workers: list[Worker] = []
        self._homes: dict[str, Worker | None] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome]:
        homes = [f"{device.capability} {trace_key(recipe)}" for recipe, device in jobs]
        return self._share(InProcess.one, jobs, homes)

    def each(
        self, function: Callable[..., Answer], jobs: Sequence[tuple[Any, ...]],
        progress: Callable[[int], None] | None = None,
    ) -> list[Answer]:  # fmt: skip
        """`function(evaluator, *job)` of each job, in their order, each of which takes long.
        progress: called with how many are done, as often as that may have changed."""
        self._start(min(self.side_by_side, len(jobs)) - 1)
        return self._share(function, jobs, [""] * len(jobs), progress)

    def _share(
        self, function: Callable[..., Answer], jobs: Sequence[tuple[Any, ...]], homes: Sequence[str],
        progress: Callable[[int], None] | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Answers to jobs, in their order: whoever is free takes the next. homes: those of one name go to one process,
        and of no name anywhere."""
        answers: dict[int, Answer] = {}
        waiting, running = list(range(len(jobs))), dict[Worker, int]()

        def take(place: Worker | None) -> int | None:
            for number in waiting:
                home = self._homes.setdefault(homes[number], place) if homes[number] else place
                if home is place or (home is not None and not home.alive()):
                    waiting.remove(number)
                    return number
            return None

        while waiting or running:
            own = take(None)
            for worker in self._workers:
                if worker not in running and worker.alive() and (number := take(worker)) is not None:
                    running[worker] = number
                    worker.send((function, jobs[number]))
            if progress is not None:
                progress(len(answers))
            if own is not None:
                began = time.process_time()
                answers[own] = function(self._own, *jobs[own])
                if time.process_time() - began >= WORTHWHILE_SECONDS:
                    self._start(self.side_by_side - 1)
            elif running:
                wait([worker.connection for worker in running])
            for worker in [worker for worker in running if worker.connection.poll()]:
                number, answer = running.pop(worker), worker.receive()
                if answer is None:  # its process has ended
                    waiting.append(number)
                else:
                    answers[number] = answer
        return [answers[number] for number in range(len(jobs))]

    def _start(self, count: int) -> None:
        """Start processes, unless there are some."""
        self._workers = self._workers or [Worker(self._greeting) for _ in range(count)]


class Worker:
    """A process that evaluates recipes, one after the other. greeting: import paths, backend, calibration."""

    def __init__(self, greeting: tuple[Any, ...]) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tightfit.planning.search.pool", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.send(greeting)

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def send(self, message: Any) -> None:
        """Hand it a job; one that has ended takes none, which `receive` says."""
        with suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Any:
        """Answer to its job; None where the process has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self.end()
            return None

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self.connection.close()


def work(connection: Connection) -> None:
    """Evaluate, in a process of a worker, what comes over a connection until it ends."""
    paths, name, calibration = connection.recv()
    sys.path[:] = paths

    from tightfit.backends import load_backend
    from tightfit.planning.standard_tools import standard_tools

    evaluate = InProcess(standard_tools(load_backend(name), calibration))
    with suppress(EOFError):
        while True:
            with gc_paused():
                for _ in range(JOBS_TO_COLLECTION):
                    function, arguments = connection.recv()
                    connection.send(function(evaluate, *arguments))


if __name__ == "__main__":
    work(Connection(int(sys.argv[1])))

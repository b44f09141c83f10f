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
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

from tightfit.calibration import Calibration
from tightfit.planning.estimate import Tools
from tightfit.planning.search.evaluate import InProcess, Job, Outcome, without_allocator_setting
from tightfit.system import POSIX, cores

Answer = TypeVar("Answer")
MOST = 4
"""Recipes evaluated at once, at most: each process takes a core and up to 2 GB."""
WORTHWHILE = 0.7
"""Processor seconds that a recipe takes from which on a process of its own pays, which imports for about five."""


class Pool:
    """An `Evaluator`: this process, and others beside it once they are up and recipes prove to take long.

    A recipe goes where it was traced before, for another GPU or another way of the allocator needs no new trace.
    Use it as a context manager; its end ends the processes.
    """

    def __init__(self, tools: Tools, backend: str, calibration: Calibration | None = None) -> None:
        self.side_by_side = max(min(cores(), MOST), 1) if POSIX else 1  # Windows lets none inherit a pipe
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
        ready = [worker for worker in self._workers if worker.ready()]
        places: list[Worker | None] = []
        for recipe, device in jobs:
            key = f"{device.capability} {without_allocator_setting(recipe)!r}"
            free = [place for place in (None, *ready) if place not in places]
            place = self._homes.setdefault(key, free[0] if free else None)
            place = place if place in ready else None
            places.append(place)
            if place is not None:
                place.send((InProcess.one, (recipe, device)))
        began, own = time.process_time(), places.count(None)
        here = iter([self._own.one(*job) for job, place in zip(jobs, places, strict=True) if place is None])
        if own and not self._workers and (time.process_time() - began) / own >= WORTHWHILE:
            self._workers = [Worker(self._greeting) for _ in range(self.side_by_side - 1)]
        found: list[Outcome] = []
        for job, place in zip(jobs, places, strict=True):
            outcome = next(here) if place is None else place.receive()
            found.append(self._own.one(*job) if outcome is None else outcome)
        return found

    def each(
        self, function: Callable[..., Answer], jobs: Sequence[tuple[Any, ...]],
        progress: Callable[[int], None] | None = None,
    ) -> list[Answer]:  # fmt: skip
        """`function(evaluator, *job)` of each job, in their order. Each takes long: whoever is free takes the next.
        progress: called with how many are done, before each that this process takes."""
        if len(jobs) > 1 and not self._workers:
            self._workers = [Worker(self._greeting) for _ in range(min(self.side_by_side, len(jobs)) - 1)]
        answers: dict[int, Answer] = {}
        waiting, running = list(range(len(jobs)))[::-1], dict[int, Worker]()
        while waiting or running:
            for worker in self._workers:
                if waiting and worker not in running.values() and worker.ready():
                    number = waiting.pop()
                    running[number] = worker
                    worker.send((function, jobs[number]))
            if progress is not None:
                progress(len(answers))
            if waiting:
                number = waiting.pop()
                answers[number] = function(self._own, *jobs[number])
            for number, worker in list(running.items()):
                if not waiting or worker.has_answered():
                    answer = worker.receive()
                    del running[number]
                    if answer is None:  # its process has ended
                        waiting.append(number)
                    else:
                        answers[number] = answer
        return [answers[number] for number in range(len(jobs))]


class Worker:
    """A process that evaluates recipes, one after the other. greeting: import paths, backend, calibration."""

    def __init__(self, greeting: tuple[Any, ...]) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tightfit.planning.search.pool", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._ready = False
        self.send(greeting)

    def ready(self) -> bool:
        """Whether it has imported what it needs and still runs."""
        if not self._ready and self._connection.poll():
            self._ready = self.receive() == "ready"
        return self._ready and self._process.poll() is None

    def has_answered(self) -> bool:
        """Whether `receive` need not wait."""
        return self._connection.poll()

    def send(self, message: Any) -> None:
        """Hand it a job; one that has ended takes none, which `receive` says."""
        try:
            self._connection.send(message)
        except OSError:
            self._ready = False

    def receive(self) -> Any:
        """Outcome of the oldest job; None where the process has ended."""
        try:
            return self._connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self._ready = False
            return None

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def work(connection: Connection) -> None:
    """Evaluate, in a process of a worker, what comes over a connection until it ends."""
    paths, name, calibration = connection.recv()
    sys.path[:] = paths

    from tightfit.backends import load_backend
    from tightfit.planning.standard_tools import standard_tools

    evaluate = InProcess(standard_tools(load_backend(name), calibration))
    connection.send("ready")
    with suppress(EOFError):
        while True:
            function, arguments = connection.recv()
            connection.send(function(evaluate, *arguments))


if __name__ == "__main__":
    work(Connection(int(sys.argv[1])))

"""Climbing a ladder: each rung in a fresh process, with a time limit, its outcome appended to the results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from tightfit.devices import MIB
from tightfit.errors import RecipeError, ReportError
from tightfit.ladder import rows as results
from tightfit.ladder.parallel import command, own_words
from tightfit.ladder.rows import FINAL, OURS, Machine, Measured, Predicted, Row, Rows, key_of
from tightfit.ladder.rungs import Ladder, Launch, Rung, Scale
from tightfit.recipe import Recipe

WORKER = "tightfit.ladder.worker"
ABOUT_SECONDS = 120.0
"""What asking for the machine may take: it loads the framework."""
SAID = 400
"""Characters of a failed process's last words that are kept."""

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How a ladder is to be climbed.

    overrides: `key=value` texts for every rung. runners: ours, and peers. warm_up, steps: of each rung. limit: seconds
    for one rung. gpu: a card to predict the full size for, besides this machine's own device at the scale that runs.
    memory: bytes that the GPU is cut down to; None for all of it. until: a moment of time.monotonic; no rung begins
    after it, and what runs then ends; None for no end. predicts: whether rungs are predicted too.
    """

    ladder: Ladder
    scale: Scale
    folder: Path
    overrides: Sequence[str] = ()
    runners: Sequence[str] = (OURS,)
    warm_up: int = 3
    steps: int = 10
    limit: float = 600.0
    gpu: str | None = None
    memory: int | None = None
    until: float | None = None
    predicts: bool = True

    @property
    def time_left(self) -> float:
        """Seconds that a rung may take if it begins now."""
        return self.limit if self.until is None else min(self.limit, self.until - time.monotonic())


@dataclass
class Climb:
    """A ladder on its way: what is asked, the machine, and the rows so far."""

    asked: Asked
    machine: Machine
    rows: Rows
    tell: Tell

    @property
    def path(self) -> Path:
        return self.asked.folder / results.RESULTS

    def newest(self, rung: Rung, runner: str) -> Measured | None:
        """The rung's last measurement on this machine by a runner; None where it has not run."""
        return self.rows.newest(self.key(rung, runner), self.machine)

    def prediction(self, rung: Rung, device: str, scale: Scale) -> Predicted | None:
        """The rung's prediction for a device; None where there is none."""
        return self.rows.prediction(self.prediction_key(rung, device, scale), device)

    def add(self, row: Row) -> None:
        results.append(self.path, row)
        self.rows.add(row)

    def recipe(self, rung: Rung, scale: Scale | None = None) -> Recipe:
        asked = self.asked
        return asked.ladder.recipe(rung, scale or asked.scale, asked.overrides)

    def within(self, rung: Rung, scale: Scale | None = None) -> dict[str, Any] | None:
        """The recipe whose memory a growing rung keeps to; None for the others."""
        if not rung.grows or rung.against is None:
            return None
        return self.recipe(self.asked.ladder.rung(rung.against), scale).to_dict()

    def key(self, rung: Rung, runner: str) -> str:
        """The digest of a rung as it runs here."""
        asked = self.asked
        return self._key(rung, asked.scale, runner=runner, steps=asked.steps, warm_up=asked.warm_up,
                         memory=asked.memory)

    def prediction_key(self, rung: Rung, device: str, scale: Scale) -> str:
        """The digest of a rung as it is predicted; the limit on memory is this machine's."""
        return self._key(rung, scale, memory=self.asked.memory if device == self.machine.device else None)

    def _key(self, rung: Rung, scale: Scale, **how: Any) -> str:
        return key_of(self.recipe(rung, scale).to_dict(), within=self.within(rung, scale), launch=rung.launch, **how)


def climb(asked: Asked, tell: Tell, machine: Machine | None = None) -> Climb:
    """Predict and run every rung that has no row yet, each as its row is known.

    machine: this one, where it is known from an earlier climb; it takes a process to ask.
    Raises RecipeError for a rung that is no recipe, ReportError where results cannot be written, and what the machine
    cannot do for any rung.
    """
    # a wrong override is said before anything runs
    recipes = [asked.ladder.recipe(rung, asked.scale, asked.overrides) for rung in asked.ladder.rungs]
    try:
        asked.folder.mkdir(parents=True, exist_ok=True)
        rows = results.read(asked.folder / results.RESULTS)
        for line in rows.skipped:
            tell(line)
        climb = Climb(asked, machine or _this_machine(recipes[0]), rows, tell)
        if asked.memory is not None and climb.machine.kind != "cuda":
            raise RecipeError("gpu-memory: this machine has no GPU to cut down; leave it out, or write --gpu with a "
                              "name to predict the full size for")
        if asked.predicts:
            _predict(climb, None, asked.scale)
        if asked.gpu is not None:
            _predict(climb, asked.gpu, "full")
        waiting = [(rung, runner) for rung in asked.ladder.rungs for runner in asked.runners
                   if _due(climb, rung, runner)]
        for number, (rung, runner) in enumerate(waiting, start=1):
            if asked.time_left <= 0:
                tell(f"the time is over: {len(waiting) - number + 1} of {len(waiting)} rungs are left")
                break
            who = "" if runner == OURS else f", {runner}"
            tell(f"rung {number} of {len(waiting)}: {rung.name}{who}")
            row = _measured(climb, rung, runner)
            climb.add(row)
            tell("  " + describe(row))
    except OSError as error:
        raise ReportError(f"output_dir: {asked.folder} cannot be written ({error.strerror or error}); write "
                          "output_dir=... elsewhere") from None
    return climb


def _this_machine(recipe: Recipe) -> Machine:
    """The machine as a rung finds it. Raises RecipeError where the recipe's device is not there."""
    found = _job({"job": "about", "recipe": recipe.to_dict()}, ABOUT_SECONDS)
    if "machine" not in found:
        raise RecipeError(found["reason"])
    return Machine(**found["machine"])


def describe(row: Measured) -> str:
    """A row in a few words."""
    if row.status != "done":
        return f"{row.status}: {row.reason}"
    return (f"{row.median_seconds:.4g} s a step, {row.samples_per_second:.4g} samples/s, "
            f"{row.driver_bytes / MIB:,.0f} MiB")


def _due(climb: Climb, rung: Rung, runner: str) -> bool:
    if runner != OURS and rung.launch != "single":
        return False  # a peer's loop has one device
    row = climb.newest(rung, runner)
    if row is None or row.status == "timed-out":
        return row is None or row.limit < climb.asked.limit
    return row.status not in FINAL


def _measured(climb: Climb, rung: Rung, runner: str) -> Measured:
    asked, recipe = climb.asked, climb.recipe(rung)
    job = {"job": "measure", "recipe": recipe.to_dict(), "runner": runner, "launch": rung.launch,
           "within": climb.within(rung), "memory": asked.memory, "warm_up": asked.warm_up, "steps": asked.steps}
    limit = asked.time_left
    found = _job(job, limit, rung.launch)
    values = {"recipe": recipe.to_dict(), **found}
    for name in ("seconds", "losses", "notes"):
        values[name] = tuple(values.get(name, ()))
    return Measured(
        ladder=asked.ladder.name, rung=rung.name, runner=runner, scale=asked.scale, key=climb.key(rung, runner),
        machine=climb.machine, date=datetime.now(UTC).isoformat(timespec="seconds"), commit=_commit(),
        limit=limit, memory=asked.memory, **values,
    )  # fmt: skip


def _predict(climb: Climb, gpu: str | None, scale: Scale) -> None:
    """Predict the rungs that have no prediction yet, on this machine's device or on `gpu`."""
    device = gpu or climb.machine.device
    rungs = []
    for rung in climb.asked.ladder.rungs:
        if rung.launch == "single" and climb.prediction(rung, device, scale) is None:
            key = climb.prediction_key(rung, device, scale)
            row = Predicted(ladder=climb.asked.ladder.name, rung=rung.name, scale=scale, key=key, device=device)
            rungs.append({"row": vars(row), "recipe": climb.recipe(rung, scale).to_dict(),
                          "within": climb.within(rung, scale)})
    if not rungs:
        return
    climb.tell(f"predicting {len(rungs)} rungs for {device}" + (", at full size" if gpu else ""))
    job = {"job": "predict", "rungs": rungs, "gpu": gpu, "results": str(climb.path),
           "memory": None if gpu else climb.asked.memory}
    found = _job(job, climb.asked.limit * len(rungs))
    if found.get("status") != "done":
        climb.tell(f"  not all were predicted: {found['reason']}")
    climb.rows = results.read(climb.path)


def _job(job: dict[str, Any], limit: float, launch: Launch = "single") -> dict[str, Any]:
    """A job's outcome; of a process that ends without one, why. Being asked to stop ends the process first."""
    with _stopping(), tempfile.TemporaryDirectory(prefix="tightfit-ladder-") as folder:
        asked, outcome, said = (Path(folder) / name for name in ("job.json", "outcome.json", "said"))
        asked.write_text(json.dumps({**job, "parent": os.getpid()}), "utf-8")
        words, more = command(launch, [WORKER, str(asked), str(outcome)])
        with said.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=output, env={**os.environ, **more},
                                       stdin=subprocess.DEVNULL, start_new_session=True)
            with _ended(process):
                try:
                    code = process.wait(limit)
                except subprocess.TimeoutExpired:
                    return {"status": "timed-out", "reason": f"took more than {limit:.0f} seconds"}
        if outcome.exists():
            found: dict[str, Any] = json.loads(outcome.read_text("utf-8"))
            return found
        return _without_outcome(code, said.read_text("utf-8", errors="replace"))


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """In the end a process is gone, with everything that it started: torchrun's processes lead groups of their own."""
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
def _stopping() -> Iterator[None]:
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


def _without_outcome(code: int, said: str) -> dict[str, Any]:
    said, killed = own_words(said)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "Error" in line or "error" in line), lines[-1] if lines else "")
    if killed or code == -signal.SIGKILL:
        return {"status": "out-of-memory", "reason": "the system ended it, as it does where host memory runs out"}
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return {"status": "failed", "reason": f"{last[-SAID:]} ({how})" if last else how}


def _commit() -> str | None:
    """The commit of the checkout that runs, where it is one."""
    with contextlib.suppress(OSError):
        found = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
                               capture_output=True, text=True, check=False)
        return found.stdout.strip() or None
    return None

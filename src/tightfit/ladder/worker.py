"""One job of a ladder, in a process of its own: `python -m tightfit.ladder.worker JOB.json OUTCOME.json PARENT`.

A fresh process has an empty allocator, no compiled code, and a card to itself; what happens to it happens to no other
rung. PARENT is the id of the ladder's own process.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tightfit.backends import load_backend
from tightfit.backends.base import Timings
from tightfit.data import prepare
from tightfit.data.loading import WindowLoader
from tightfit.devices import Device
from tightfit.errors import MissingLibrary, NonFiniteLoss, OutOfMemory, Refused, TightfitError
from tightfit.ladder.cards import card
from tightfit.ladder.growing import grown
from tightfit.ladder.jobs import (
    JOB,
    OUTCOME,
    About,
    Figures,
    Job,
    Measure,
    Outcome,
    Predict,
    Unpredicted,
)
from tightfit.ladder.parallel import end_others, run_parallel, writes_outcome
from tightfit.ladder.peers import PEERS
from tightfit.ladder.rows import OF_SOME, OURS, Machine, Status, append
from tightfit.models import model_facts
from tightfit.nvml import driver_version
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import Margin, fit, steps_alone
from tightfit.planning.search.resolve_auto import resolve_auto
from tightfit.planning.search.search import check_length
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.targets import own_target
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.training.memory_check import check_memory
from tightfit.versions import installed

LIBRARIES = ("torch", "transformers", "tightfit", "torchao", "torch-optimi", "triton", "flash-attn", "jax", *OF_SOME)
"""Whose versions a figure may depend on."""

ORPHANED = 3
"""The exit status of a worker whose ladder is gone."""


def main(job: Path, outcome: Path, parent: int) -> None:
    """Do a job and write what came of it; errors that a person can act on are an outcome."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    asked = JOB.validate_json(job.read_bytes())
    try:
        found = JOBS[type(asked)](asked)
    except TightfitError as error:
        found = Outcome(status=status_of(error), reason=str(error))
    if writes_outcome(found):
        temporary = outcome.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(OUTCOME.dump_json(found))
        temporary.replace(outcome)
    end_others(found)


def status_of(error: TightfitError) -> Status:
    """What a rung came to that ended so."""
    if isinstance(error, OutOfMemory):
        return "out-of-memory"
    return "refused" if isinstance(error, (Refused, MissingLibrary)) else "failed"


PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when the one that started it ends."""


def end_with_starter(parent: int) -> None:
    """Have the system end this process with the one that started it, where it can: on Linux. A thread of ours cannot
    look for it while C code holds Python's lock."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if not psutil.pid_exists(parent):  # it ended before that was asked for
        os._exit(ORPHANED)


def _end_with(parent: int) -> None:
    """End when the ladder ends: killed, it can end nobody else, and a rung that goes on would hold the card."""
    while psutil.pid_exists(parent):
        time.sleep(1)
    os._exit(ORPHANED)


def about(asked: About) -> Outcome:
    """What this machine is, as far as figures depend on it."""
    recipe = Recipe.from_dict(asked.recipe)
    device = load_backend(recipe.backend.name).device(recipe)
    return Outcome(machine=Machine(
        device=device.name, kind=device.kind, memory_bytes=device.memory_bytes, units=device.units,
        driver=driver_version() if device.kind == "cuda" else None, versions=_versions(),
    ))  # fmt: skip


def measure(asked: Measure) -> Outcome:
    """Run a rung: ours, or a peer's of the same model, data, seed and number of steps."""
    recipe, notes = Recipe.from_dict(asked.recipe), list[str]()
    backend = load_backend(recipe.backend.name)
    device = backend.device(recipe) if asked.memory is None else backend.limit_memory(recipe, asked.memory)
    recipe, _ = resolve_auto(recipe, own_target(device), backend.predict, notes.append)
    if asked.within is not None:
        within = resolve(Recipe.from_dict(asked.within), device)
        recipe = grown(recipe, within, own_target(device), backend)
        notes.append(f"batch_size {recipe.batch_size}")
    check_memory(recipe, device, backend.predict, notes.append)
    runner = PEERS[asked.runner] if asked.runner != OURS else _ours
    if asked.launch != "single":
        runner = partial(run_parallel, asked.launch)
    timings: Timings = runner(recipe, device, asked.warm_up, asked.steps)
    for step, loss in enumerate(timings.losses, 1):
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"the loss of step {step} is {loss}: what its steps took tells nothing of training")
    tokens = recipe.batch_size * recipe.seq_len if TASKS[recipe.task].reads == "tokens" else 0
    return Outcome(figures=Figures(recipe=recipe.to_dict(), samples=recipe.batch_size, tokens=tokens,
                                   notes=tuple(notes), **asdict(timings)))


def _ours(recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
    backend = load_backend(recipe.backend.name)
    data = prepare(recipe, model_facts(recipe))
    build = backend.build(recipe, device)
    step = backend.step(build)
    windows = step.windows(WindowLoader(data.train, recipe), 0, warm_up + steps + 1)
    return backend.time(step, windows, warm_up, steps)


def predict(asked: Predict) -> Outcome:
    """Predict rungs, each appended to the results as it is known."""
    versions = _versions()
    for rung in asked.rungs:
        row = replace(rung.row, date=datetime.now(UTC).isoformat(timespec="seconds"), versions=versions)
        try:
            row = replace(row, **_predicted(rung, asked.gpu, asked.memory))
        except TightfitError as error:
            row = replace(row, status=status_of(error), reason=str(error))
        append(Path(asked.results), row)
    return Outcome()


def _predicted(rung: Unpredicted, gpu: str | None, limit: int | None) -> dict[str, Any]:
    """What a rung's row says of it."""
    recipe, within = Recipe.from_dict(rung.recipe), rung.within
    backend = load_backend(recipe.backend.name)
    target = own_target(backend.device(recipe)) if gpu is None else card(gpu)
    if limit is not None:
        target = replace(target, device=replace(target.device, memory_bytes=limit))
    tools = standard_tools(backend.predict, target.ceilings)
    notes: list[str] = []
    check_length(recipe)
    recipe, _ = resolve_auto(recipe, target, backend.predict, notes.append)
    if within is not None:
        recipe = grown(recipe, resolve(Recipe.from_dict(within), target.device), target, backend)
        notes.append(f"batch_size {recipe.batch_size}")
    recipe = resolve(recipe, target.device)
    if refused := recipe.refusals(target.device):
        raise Refused("; ".join(refused))
    trace = backend.predict(recipe, target.device)
    found = fit(steps_alone(trace), target.device, tools, Margin())
    timed = tools.step_time(trace, recipe, target.device)
    return {
        "fits": found.fits, "step_seconds": timed.seconds, "calibrated": timed.calibrated,
        "peak_allocated": found.memory.peak_allocated, "peak_reserved": found.memory.peak_reserved,
        "context": found.memory.context,
        "notes": (*notes, *trace.notes), "samples": recipe.batch_size,
    }  # fmt: skip


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **installed(LIBRARIES)}


JOBS: dict[type[Job], Callable[[Any], Outcome]] = {About: about, Measure: measure, Predict: predict}

if __name__ == "__main__":
    end_with_starter(int(sys.argv[3]))
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

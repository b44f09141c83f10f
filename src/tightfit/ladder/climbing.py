"""Climbing a ladder: each rung in a fresh process, with a time limit, its outcome appended to the results."""

from __future__ import annotations

import contextlib
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from tightfit.devices import MIB
from tightfit.errors import RecipeError, ReportError
from tightfit.ladder.climbs import Asked, Climb, Tell
from tightfit.ladder.jobs import About, Measure, Predict, Unpredicted
from tightfit.ladder.processes import run_job
from tightfit.ladder.rows import FINAL, OURS, RESULTS, Machine, Measured, Predicted, read
from tightfit.ladder.rungs import Rung, Scale
from tightfit.recipe import Recipe

ABOUT_SECONDS = 120.0
"""What asking for the machine may take: it loads the framework."""


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
        rows = read(asked.folder / RESULTS)
        for line in rows.skipped:
            tell(line)
        begun = Climb(asked, machine or this_machine(recipes[0]), rows, tell)
        if asked.memory is not None and begun.machine.kind != "cuda":
            raise RecipeError("gpu-memory: this machine has no GPU to cut down; leave it out, or write --gpu with a "
                              "name to predict the full size for")
        if asked.predicts:
            _predict(begun, None, asked.scale)
        if asked.gpu is not None:
            _predict(begun, asked.gpu, "full")
        waiting = [(rung, runner) for rung in asked.ladder.rungs for runner in asked.runners
                   if _due(begun, rung, runner)]
        every = len(asked.ladder.rungs) * len(asked.runners)
        if 0 < len(waiting) < every:
            tell(f"going on: {every - len(waiting)} of {every} rungs have their row, or need none")
        for number, (rung, runner) in enumerate(waiting, start=1):
            if asked.time_left <= 0:
                tell(f"the time is over: {len(waiting) - number + 1} of {len(waiting)} rungs are left")
                break
            who = "" if runner == OURS else f", {runner}"
            tell(f"rung {number} of {len(waiting)}: {rung.name}{who}")
            row = _measured(begun, rung, runner)
            begun.add(row)
            tell("  " + describe(row))
    except OSError as error:
        raise ReportError(f"output_dir: {asked.folder} cannot be written ({error.strerror or error}); write "
                          "output_dir=... elsewhere") from None
    return begun


def this_machine(recipe: Recipe) -> Machine:
    """The machine as a rung finds it. Raises RecipeError where the recipe's device is not there."""
    found = run_job(About(recipe=recipe.to_dict()), ABOUT_SECONDS)
    if found.machine is None:
        raise RecipeError(found.reason)
    return found.machine


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
    asked, limit = climb.asked, climb.asked.time_left
    job = Measure(recipe=climb.recipe(rung).to_dict(), runner=runner, launch=rung.launch, within=climb.within(rung),
                  memory=asked.memory, warm_up=asked.warm_up, steps=asked.steps)
    found = run_job(job, limit)
    figures = {"recipe": job.recipe} if found.figures is None else vars(found.figures)
    return Measured(
        ladder=asked.ladder.name, rung=rung.name, runner=runner, scale=asked.scale, key=climb.key(rung, runner),
        status=found.status, reason=found.reason, machine=climb.machine,
        date=datetime.now(UTC).isoformat(timespec="seconds"), commit=_commit(), limit=limit, memory=asked.memory,
        **figures,
    )  # fmt: skip


def _predict(climb: Climb, gpu: str | None, scale: Scale) -> None:
    """Predict the rungs that have no prediction yet, on this machine's device or on `gpu`."""
    device = gpu or climb.machine.device
    rungs = []
    for rung in climb.asked.ladder.rungs:
        if rung.launch == "single" and climb.prediction(rung, device, scale) is None:
            row = Predicted(ladder=climb.asked.ladder.name, rung=rung.name, scale=scale, device=device,
                            key=climb.prediction_key(rung, device, scale))
            rungs.append(Unpredicted(row=row, recipe=climb.recipe(rung, scale).to_dict(),
                                     within=climb.within(rung, scale)))
    if not rungs:
        return
    climb.tell(f"predicting {len(rungs)} rungs for {device}" + (", at full size" if gpu else ""))
    job = Predict(rungs=tuple(rungs), gpu=gpu, results=str(climb.path), memory=None if gpu else climb.asked.memory)
    found = run_job(job, climb.asked.limit * len(rungs))
    if found.status != "done":
        climb.tell(f"  not all were predicted: {found.reason}")
    climb.rows = read(climb.path)


def _commit() -> str | None:
    """The commit of the checkout that runs, where it is one."""
    with contextlib.suppress(OSError):
        found = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
                               capture_output=True, text=True, check=False)
        return found.stdout.strip() or None
    return None

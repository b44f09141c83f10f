"""Climbing a ladder: each rung in a fresh process, with a time limit, its outcome appended to the results."""

from __future__ import annotations

from datetime import UTC, datetime

from tightfit.devices import MIB
from tightfit.errors import RecipeError, ReportError
from tightfit.ladder.climbs import Asked, Climb, Tell
from tightfit.ladder.jobs import About, Measure
from tightfit.ladder.peers import title_of
from tightfit.ladder.predicting import predict_rungs
from tightfit.ladder.processes import run_job
from tightfit.ladder.rows import OURS, RESULTS, Machine, Measured, Rows, read
from tightfit.ladder.rungs import Rung
from tightfit.recipe import Recipe
from tightfit.training.run_folder import locked

ABOUT_SECONDS = 120.0
"""What asking for the machine may take: it loads the framework."""
NAMED = 5
"""Lines that are no results, and are named before the ladder begins."""


def climb(asked: Asked, tell: Tell, machine: Machine | None = None) -> Climb:
    """Run every rung that has no row yet, then predict each; a row is kept as soon as it is known.

    machine: this one, where it is known from an earlier climb; it takes a process to ask.
    Raises RecipeError for a rung that is no recipe, a folder that another ladder is writing to, and what the machine
    cannot do for any rung; ReportError where results cannot be read or written.
    """
    # a wrong override is said before anything runs
    recipes = [asked.ladder.recipe(rung, asked.scale, asked.overrides) for rung in asked.ladder.rungs]
    try:
        asked.folder.mkdir(parents=True, exist_ok=True)
        with locked(asked.folder):
            rows = _read(asked, tell)
            begun = Climb(asked, machine or this_machine(recipes[0]), rows, tell)
            if asked.memory is not None and begun.machine.kind != "cuda":
                raise RecipeError("gpu-memory: this machine has no GPU to cut down; leave it out, or write --gpu with "
                                  "a name or a size to predict the full size for")
            _measure_rungs(begun)
            if asked.predicts:
                predict_rungs(begun, None, asked.scale)
            if asked.gpu is not None:
                predict_rungs(begun, asked.gpu, "full")
    except OSError as error:
        raise ReportError(f"output_dir: {asked.folder} cannot be written ({error.strerror or error}); write "
                          "output_dir=... elsewhere") from None
    return begun


def _read(asked: Asked, tell: Tell) -> Rows:
    """The rows so far; a few of the lines that are none are named, and how many more there are."""
    rows = read(asked.folder / RESULTS)
    for line in rows.skipped[:NAMED]:
        tell(line)
    if len(rows.skipped) > NAMED:
        tell(f"{len(rows.skipped) - NAMED} more lines are no results either")
    return rows


def _measure_rungs(climb: Climb) -> None:
    """Run every rung that has no row yet, by each runner, as far as the time goes."""
    asked = climb.asked
    waiting = [(rung, runner) for rung in asked.ladder.rungs for runner in asked.runners if _due(climb, rung, runner)]
    every = len(asked.ladder.rungs) * len(asked.runners)
    if 0 < len(waiting) < every:
        climb.tell(f"going on: {every - len(waiting)} of {every} rungs have their row, or need none")
    for number, (rung, runner) in enumerate(waiting, start=1):
        if asked.time_left <= 0:
            climb.tell(f"the time is over: {len(waiting) - number + 1} of {len(waiting)} rungs are left")
            break
        who = "" if runner == OURS else f", {title_of(runner)}"
        climb.tell(f"rung {number} of {len(waiting)}: {rung.name}{who}")
        row = _measured(climb, rung, runner)
        climb.add(row)
        climb.tell("  " + describe(row))


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
    return climb.is_due(climb.newest(rung, runner))


def _measured(climb: Climb, rung: Rung, runner: str) -> Measured:
    asked, limit = climb.asked, climb.asked.time_left
    job = Measure(recipe=climb.recipe(rung).to_dict(), runner=runner, launch=rung.launch, within=climb.within(rung),
                  memory=asked.memory, warm_up=asked.warm_up, steps=asked.steps)
    found = run_job(job, limit)
    figures = {"recipe": job.recipe} if found.figures is None else vars(found.figures)
    return Measured(
        ladder=asked.ladder.name, rung=rung.name, runner=runner, scale=asked.scale, key=climb.key(rung, runner),
        status=found.status, reason=found.reason, machine=climb.machine,
        date=datetime.now(UTC).isoformat(timespec="seconds"), commit=climb.commit, limit=limit, memory=asked.memory,
        **figures,
    )  # fmt: skip

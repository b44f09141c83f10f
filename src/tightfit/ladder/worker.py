"""A ladder's jobs, in a process of their own: `python -m tightfit.ladder.worker JOBS OUTCOMES PARENT`.

A fresh process has an empty allocator, no compiled code, and a card to itself; what happens to it happens to no other
rung. PARENT is the id of the ladder's own process.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from tightfit.backends import backend_of
from tightfit.backends.base import Backend
from tightfit.backends.measurements import Timings
from tightfit.data import prepare
from tightfit.devices import Device
from tightfit.errors import MissingLibrary, NonFiniteLoss, OutOfMemory, Refused, TightfitError
from tightfit.ladder.jobs import Job, Outcome
from tightfit.ladder.peers import PEERS
from tightfit.ladder.rows import OURS, Machine, Status
from tightfit.ladder.rungs import card
from tightfit.model_facts import model_facts
from tightfit.nvml import driver_version
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import estimate, predict_memory, steps_alone
from tightfit.planning.largest import largest_that_fits
from tightfit.planning.resolve_auto import resolve_auto
from tightfit.planning.search.search import check_length
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.targets import Target, own_target
from tightfit.recipe import Recipe
from tightfit.system import end_with, installed
from tightfit.tasks import TASKS
from tightfit.training.session import Session, training_global_batches

LIBRARIES = ("torch", "transformers", "tightfit", "torchao", "torch-optimi", "triton", "flash-attn", "jax",
             *(library for peer in PEERS.values() for library in peer.libraries))  # fmt: skip
"""Libraries whose versions a figure may depend on."""
GROWTH_MULTIPLES = (1.5, 2, 3, 4, 6, 8, 12, 16)
"""Multiples of its batch at which a rung that grows is tried."""


def main(asked: Path, outcomes: Path, parent: int) -> None:
    """Do the jobs and write what came of each; errors that a person can act on are an outcome."""
    end_with(parent)
    for job in map(Job.model_validate_json, asked.read_bytes().splitlines()):
        try:
            found = KINDS[job.kind](job)
        except TightfitError as error:
            found = Outcome(status=status_of(error), reason=str(error))
        failed = found.status != "done"
        if failed or os.environ.get("RANK", "0") == "0":  # of several processes the first writes, and any that failed
            with outcomes.open("a", encoding="utf-8") as file:
                file.write(found.model_dump_json() + "\n")
        if failed and "RANK" in os.environ:
            os._exit(1)  # torchrun then ends the other processes, which may wait for this one


def status_of(error: TightfitError) -> Status:
    """The status of a rung that ended with an error."""
    if isinstance(error, OutOfMemory):
        return "out-of-memory"
    return "refused" if isinstance(error, (Refused, MissingLibrary)) else "failed"


def machine(job: Job) -> Outcome:
    """This machine, as far as figures depend on it. Raises what is wrong with the recipe itself, whatever rungs change:
    its model, its data."""
    recipe = Recipe.from_dict(job.recipe)
    backend = backend_of(recipe)
    device = backend.device(recipe)
    if device.kind == "cpu":  # where a rung asks for it as well
        backend.model_size(recipe)
    prepare(recipe, model_facts(recipe))
    return Outcome(values=Machine(
        device=device.name, kind=device.kind, memory_bytes=device.memory_bytes, units=device.units,
        driver=driver_version() if device.kind == "cuda" else None,
        versions={"python": platform.python_version(), **installed(LIBRARIES)},
    ).model_dump())  # fmt: skip


def measure(job: Job) -> Outcome:
    """Run a rung: ours, or a peer's of the same model, data, seed and number of steps."""
    notes, recipe = list[str](), Recipe.from_dict(job.recipe)
    backend = backend_of(recipe)
    device = backend.device(recipe) if job.memory is None else backend.limit_memory(recipe, job.memory)
    recipe = _resolved(job, own_target(device), backend, notes)
    Session(recipe=recipe, device=device, backend=backend).check_memory(notes.append)
    runner = PEERS[job.runner].run if job.runner != OURS else _ours
    if job.launch != "single":
        from tightfit.ladder.two_devices import run_parallel

        runner = partial(run_parallel, job.launch)
    timings = runner(recipe, device, job.warm_up, job.steps)
    for step, loss in enumerate(timings.losses, 1):
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"the loss of step {step} is {loss}: its step times say nothing of training")
    tokens = recipe.batch_size * recipe.seq_len if TASKS[recipe.task].reads == "tokens" else 0
    return Outcome(values={"recipe": recipe.to_dict(), "samples": recipe.batch_size, "tokens": tokens, "notes": notes,
                           **asdict(timings)})


def _ours(recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
    backend = backend_of(recipe)
    source = training_global_batches(recipe)
    step = backend.step(backend.build(recipe, device))
    global_batches = step.global_batches(source, 0, warm_up + steps + 1)
    return backend.time(step, global_batches, warm_up, steps)


def predict(job: Job) -> Outcome:
    """Predict a rung for this machine's device, or for another card."""
    notes, recipe = list[str](), Recipe.from_dict(job.recipe)
    backend = backend_of(recipe)
    target = own_target(backend.device(recipe)) if job.gpu is None else card(job.gpu)
    if job.memory is not None:
        target = replace(target, device=replace(target.device, memory_bytes=job.memory))
    check_length(recipe)
    recipe = _resolved(job, target, backend, notes)
    trace = backend.predict(recipe, target.device)
    found = estimate(steps_alone(trace), recipe, target.device, standard_tools(backend, target.calibration))
    memory, time = found.memory, found.time
    return Outcome(values={
        "fits": memory.verdict, "step_seconds": time.step_seconds, "calibrated": time.calibrated,
        "peak_allocated": memory.peak_allocated, "peak_reserved": memory.peak_reserved,
        "context": memory.context, "notes": [*notes, *trace.notes], "samples": recipe.batch_size,
    })  # fmt: skip


def _resolved(job: Job, target: Target, backend: Backend, notes: list[str]) -> Recipe:
    """The job's recipe with no `auto` left, at the batch that it grows to."""
    recipe, _ = resolve_auto(Recipe.from_dict(job.recipe), target, backend, notes.append)
    if job.within is not None:
        within = resolve(Recipe.from_dict(job.within), target.device)
        recipe = largest_batch(recipe, within, target, backend)
        notes.append(f"batch_size {recipe.batch_size}")
    return resolve(recipe, target.device)


def largest_batch(recipe: Recipe, within: Recipe, target: Target, backend: Backend) -> Recipe:
    """The recipe at the largest batch of GROWTH_MULTIPLES that is predicted to need no more memory than another.

    recipe, within: resolved. Raises as predicting does.
    """
    tools = standard_tools(backend, target.calibration)

    def needs(asked: Recipe) -> int:
        trace = steps_alone(backend.predict(asked, target.device))
        return predict_memory(trace, asked, target.device, tools).peak_reserved

    def at(batch: int) -> Recipe:
        return recipe.override(batch_size=batch, micro_batch_size=batch)

    sizes = sorted({int(within.batch_size * factor) for factor in GROWTH_MULTIPLES} - {within.batch_size})
    batch = largest_that_fits(sizes, lambda size: needs(at(size)), needs(within))
    return recipe if batch is None else at(batch)


KINDS: dict[str, Callable[[Job], Outcome]] = {"machine": machine, "measure": measure, "predict": predict}

if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

"""Running a ladder: each rung in a fresh process, with a time limit, its result appended to the results."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tightfit.devices import MIB
from tightfit.errors import RecipeError, writing
from tightfit.ladder.jobs import Job, Outcome, run_jobs
from tightfit.ladder.peers import PEERS, title_of
from tightfit.ladder.rows import (
    FINAL_OUTCOMES,
    OURS,
    RESULTS,
    AnyRow,
    Machine,
    Measured,
    Predicted,
    Row,
    Rows,
    all_rounds,
    append,
    input_fingerprint,
    is_far_off,
    read,
)
from tightfit.ladder.rungs import Ladder, Rung, Scale
from tightfit.recipe import Recipe
from tightfit.text import counted
from tightfit.training.run_folder import locked

Log = Callable[[str], None]

RUNG_SECONDS = 600.0
"""Seconds that one rung may take, where nothing else is asked for."""


@dataclass(kw_only=True)
class LadderRun:
    """A ladder on its way.

    log: takes sentences on its progress. overrides: `key=value` texts for every rung. runners: ours, and peers.
    warm_up, steps: of each rung. limit: seconds for one rung. gpu: a card to predict the full size for, besides this
    machine's own device at the scale that runs. memory: bytes that the GPU is cut down to; None for all of it.
    predicts: whether rungs are predicted too. fresh: whether rungs that have a row are run and predicted anew.
    rows: those so far.
    """

    ladder: Ladder
    scale: Scale
    folder: Path
    machine: Machine
    log: Log
    warm_up: int
    steps: int
    limit: float = RUNG_SECONDS
    overrides: Sequence[str] = ()
    runners: Sequence[str] = (OURS,)
    gpu: str | None = None
    memory: int | None = None
    predicts: bool = True
    fresh: bool = False
    rows: Rows = field(default_factory=Rows)

    @property
    def path(self) -> Path:
        return self.folder / RESULTS

    def measured(self, rung: Rung, runner: str) -> Measured | None:
        """The rung's newest measurement on this machine by a runner; None where it has not run."""
        key = self.key(rung, runner)
        return all_rounds([row for row in self.rows.measured if row.key == key])

    def predicted(self, rung: Rung, device: str, scale: Scale) -> Predicted | None:
        """The rung's newest prediction for a device; None where there is none."""
        key = self.predicted_key(rung, device, scale)
        return next((row for row in reversed(self.rows.predicted) if row.key == key), None)

    def recipe(self, rung: Rung, scale: Scale | None = None) -> Recipe:
        return self.ladder.recipe(rung, scale or self.scale, self.overrides)

    def refusals(self, rung: Rung) -> list[str]:
        """Reasons why the rung cannot run here, by whatever runner, as far as the device is known."""
        return self.machine.refusals(self.recipe(rung), rung.launch)

    def within(self, rung: Rung, scale: Scale | None = None) -> dict[str, Any] | None:
        """The recipe whose memory a growing rung keeps to; None for the others."""
        if not rung.grows or rung.against is None:
            return None
        return self.recipe(self.ladder.rung(rung.against), scale).to_dict()

    def key(self, rung: Rung, runner: str) -> str:
        """The fingerprint of a rung as it runs here."""
        return self._fingerprint(rung, self.scale, self._seen_by(runner), runner=runner, steps=self.steps,
                                 warm_up=self.warm_up, memory=self.memory)

    def predicted_key(self, rung: Rung, device: str, scale: Scale) -> str:
        """The fingerprint of a rung's prediction: for this machine's own device, all that the machine is counts."""
        machine, memory = self._seen_by(OURS), self.memory
        if device != self.machine.device:
            machine, memory = {"device": device, "versions": machine["versions"]}, None
        return self._fingerprint(rung, scale, machine, memory=memory)

    def _seen_by(self, runner: str) -> dict[str, Any]:
        """The machine with those libraries alone that a runner's figures depend on."""
        own = PEERS[runner].libraries if runner in PEERS else ()
        others = {library for peer in PEERS.values() for library in peer.libraries} - set(own)
        versions = {name: version for name, version in self.machine.versions.items() if name not in others}
        return {**self.machine.model_dump(), "versions": versions}

    def _fingerprint(self, rung: Rung, scale: Scale, machine: dict[str, Any], **how: Any) -> str:
        return input_fingerprint(self.recipe(rung, scale).to_dict(), within=self.within(rung, scale),
                                 launch=rung.launch, machine=machine, **how)

    def is_due(self, row: Row | None) -> bool:
        """Whether a rung is to be run: it has no row, failed, was killed, or may take longer than it could."""
        if row is None:
            return True
        return row.limit < self.limit if row.status == "timed-out" else row.status not in FINAL_OUTCOMES

    def add(self, kind: type[AnyRow], rung: Rung, outcome: Outcome, **known: Any) -> AnyRow:
        """Keep a rung's row with its outcome."""
        row = kind.model_validate({
            "ladder": self.ladder.name, "rung": rung.name, "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "limit": self.limit, **known, **outcome.values, "status": outcome.status, "reason": outcome.reason,
        })  # fmt: skip
        append(self.path, row)
        self.rows.add(row)
        return row

    @cached_property
    def commit(self) -> str | None:
        """The last commit that changed the package, where a checkout of it runs."""
        package = str(Path(__file__).parents[1])
        with contextlib.suppress(OSError):
            found = subprocess.run(["git", "-C", package, "log", "-1", "--format=%h", "--", "."],
                                   capture_output=True, text=True, check=False)
            return found.stdout.strip() or None
        return None


ROUNDS = 3
"""Times that a rung is measured at most."""


def this_machine(recipe: Recipe, limit: float = RUNG_SECONDS) -> Machine:
    """The machine as a rung finds it. Raises RecipeError where the recipe's device, model or data is not there, and
    where reading the data takes longer than a rung may. limit: seconds of one, the usual ones or more here."""
    (found,) = run_jobs([Job(kind="machine", recipe=recipe.to_dict())], max(limit, RUNG_SECONDS))
    if found.status == "timed-out":
        raise RecipeError(f"data: reading it {found.reason}; write --limit with more, or less data")
    if found.status != "done":
        raise RecipeError(found.reason)
    return Machine(**found.values)


def run_rungs(run: LadderRun) -> None:
    """Run every rung that has no row yet, then predict each; a row is kept as soon as it is known.

    Raises RecipeError for a rung that is no recipe, and a folder that another ladder is writing to; ReportError where
    results cannot be read or written.
    """
    for rung in run.ladder.rungs:
        run.recipe(rung)  # a wrong override is said before anything runs
    with writing(f"output_dir: {run.folder}", "write output_dir=... elsewhere"):
        run.folder.mkdir(parents=True, exist_ok=True)
        with locked(run.folder):
            found = read(run.path)
            if found.skipped:
                more = len(found.skipped) - 1
                run.log(found.skipped[0] + (f"; {more} more lines are none either" if more else ""))
            if not run.fresh:
                run.rows = found
            _measure(run)
            _measure_again(run)
            of_xla = run.recipe(run.ladder.rungs[0]).backend.compiles_whole_steps  # whose figures for a CPU mislead
            if run.predicts and not (of_xla and run.machine.kind == "cpu"):
                _predict(run, None)
            if run.gpu is not None:
                _predict(run, run.gpu)


def _measure(run: LadderRun) -> None:
    """Run every rung that has no row yet, by each runner. A peer's loop has one device. What cannot serve here is a row
    without being started."""
    waiting = [(rung, runner) for rung in run.ladder.rungs for runner in run.runners
               if (runner == OURS or rung.launch == "single") and run.is_due(run.measured(rung, runner))]
    every = len(run.ladder.rungs) * len(run.runners)
    if 0 < len(waiting) < every:
        run.log(f"resuming: {every - len(waiting)} of {every} rungs have their row, or need none")
    left, refused = list[tuple[Rung, str]](), dict[str, None]()
    for rung, runner in waiting:
        if reasons := run.refusals(rung):
            _keep(run, rung, runner, Outcome(status="refused", reason="; ".join(reasons)))
            refused[rung.name] = None
        else:
            left.append((rung, runner))
    if refused:
        run.log(f"{counted(len(refused), 'rung')} cannot run on {run.machine.device}, for the reasons below the table: "
                f"{'; '.join(refused)}")
    for number, (rung, runner) in enumerate(left, start=1):
        _measure_rung(run, rung, runner, f"rung {number} of {len(left)}")


def _keep(run: LadderRun, rung: Rung, runner: str, outcome: Outcome, number: int = 0) -> Measured:
    """Keep the row of a rung that was measured, or refused. number: of its round."""
    return run.add(Measured, rung, outcome, runner=runner, scale=run.scale, key=run.key(rung, runner),
                   machine=run.machine, recipe=run.recipe(rung).to_dict(), commit=run.commit, memory=run.memory,
                   round=number)


def _measure_rung(run: LadderRun, rung: Rung, runner: str, called: str, number: int = 0) -> None:
    """Run a rung and keep its row. number: of its round."""
    run.log(f"{called}: {rung.name}" + ("" if runner == OURS else f", {title_of(runner)}"))
    job = Job(kind="measure", recipe=run.recipe(rung).to_dict(), runner=runner, launch=rung.launch,
              within=run.within(rung), memory=run.memory, warm_up=run.warm_up, steps=run.steps)
    (outcome,) = run_jobs([job], run.limit)
    run.log("  " + describe(_keep(run, rung, runner, outcome, number)))


def _measure_again(run: LadderRun) -> None:
    """Run rungs in further rounds whose figures are not to be trusted: where timed steps spread, as on a busy machine,
    and where a rung is far off its neighbours."""
    for number in range(1, ROUNDS):
        doubtful = list(_doubtful(run, number))
        for place, (rung, runner) in enumerate(doubtful, start=1):
            _measure_rung(run, rung, runner, f"round {number + 1}, {place} of {len(doubtful)}", number)


def _doubtful(run: LadderRun, number: int) -> Iterator[tuple[Rung, str]]:
    """The rungs to run in that round."""
    for runner in run.runners:
        found = [(rung, row) for rung in run.ladder.rungs
                 if (row := run.measured(rung, runner)) is not None and row.status == "done"]
        for place, (rung, row) in enumerate(found):
            beside = [other.samples_per_second for _, other in found[max(place - 1, 0) : place + 2] if other is not row]
            if row.round < number and (not row.is_steady or is_far_off(row.samples_per_second, beside)):
                yield rung, runner


def describe(row: Measured) -> str:
    """A row in a few words."""
    if row.status != "done":
        return f"{row.status}: {row.reason}"
    return (f"{row.median_seconds:.4g} s a step, {row.samples_per_second:.4g} samples/s, "
            f"{row.driver_bytes / MIB:,.0f} MiB")


def _predict(run: LadderRun, gpu: str | None) -> None:
    """Predict the rungs that have no prediction yet, on this machine's device, or at full size for `gpu`.

    One process predicts them all, and another goes on where a rung hangs or takes it along. Each has the limit to
    itself.
    """
    device = gpu or run.machine.device
    scale: Scale = "full" if gpu else run.scale
    waiting = [rung for rung in run.ladder.rungs
               if rung.launch == "single" and run.is_due(run.predicted(rung, device, scale))
               and (gpu or not run.refusals(rung))]
    every, where = len(waiting), f"for {device}, at full size" if gpu else f"for {device}"

    def announce() -> None:
        if waiting:
            run.log(f"predicting {every - len(waiting) + 1} of {every} {where}: {waiting[0].name}")

    announce()
    while waiting:
        jobs = [Job(kind="predict", recipe=run.recipe(rung, scale).to_dict(), within=run.within(rung, scale), gpu=gpu,
                    memory=None if gpu else run.memory) for rung in waiting]
        for outcome in run_jobs(jobs, run.limit):
            rung = waiting.pop(0)
            run.add(Predicted, rung, outcome, scale=scale, device=device, key=run.predicted_key(rung, device, scale),
                    versions=run.machine.versions)
            if outcome.status != "done":
                run.log(f"  {rung.name} is not predicted: {outcome.reason}")
            announce()

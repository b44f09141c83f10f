"""A ladder on its way: how it is to be climbed, and what is known of it so far."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tightfit import calibration
from tightfit.ladder.contents import contents
from tightfit.ladder.rows import FINAL, OURS, RESULTS, Machine, Measured, Predicted, Row, Rows, append, key_of
from tightfit.ladder.rungs import Ladder, Rung, Scale
from tightfit.recipe import Recipe

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
    warm_up: int
    steps: int
    limit: float
    overrides: Sequence[str] = ()
    runners: Sequence[str] = (OURS,)
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
    _contents: dict[tuple[str, str, str], str | None] = field(default_factory=dict, repr=False)

    @property
    def path(self) -> Path:
        return self.asked.folder / RESULTS

    def newest(self, rung: Rung, runner: str) -> Measured | None:
        """The rung's last measurement on this machine by a runner; None where it has not run."""
        return self.rows.newest(self.key(rung, runner), self.machine)

    def prediction(self, rung: Rung, device: str, scale: Scale) -> Predicted | None:
        """The rung's prediction for a device; None where there is none."""
        return self.rows.prediction(self.prediction_key(rung, device, scale), device)

    def is_due(self, row: Row | None) -> bool:
        """Whether what a row tells is still to be found out: again where it failed, was killed, or may take longer."""
        if row is None:
            return True
        return row.limit < self.asked.limit if row.status == "timed-out" else row.status not in FINAL

    def add(self, row: Row) -> None:
        append(self.path, row)
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
        """The digest of a rung as it runs here, and of the files here that it names."""
        asked = self.asked
        return self._key(rung, asked.scale, runner=runner, steps=asked.steps, warm_up=asked.warm_up,
                         memory=asked.memory)

    def prediction_key(self, rung: Rung, device: str, scale: Scale) -> str:
        """The digest of a rung as it is predicted, and of what predictions depend on: the code, the libraries and, for
        this machine's own device, what it is, what it was calibrated to, and the limit on its memory."""
        machine = self.machine.seen_by(OURS)
        own = device == machine.device
        return self._key(rung, scale, commit=self.commit, machine=asdict(machine) if own else machine.versions,
                         memory=self.asked.memory if own else None, ceilings=self._ceilings if own else None)

    @cached_property
    def commit(self) -> str | None:
        """The last commit that changed the package, where a checkout of it runs."""
        package = str(Path(__file__).parents[1])
        with contextlib.suppress(OSError):
            found = subprocess.run(["git", "-C", package, "log", "-1", "--format=%h", "--", "."],
                                   capture_output=True, text=True, check=False)
            return found.stdout.strip() or None
        return None

    @cached_property
    def _ceilings(self) -> str | None:
        """The digest of this machine's calibration; None where there is none that its plans would use."""
        machine = self.machine
        found = calibration.load(machine.device, threads=machine.units if machine.kind == "cpu" else 0)
        return None if found is None else key_of({}, ceilings=asdict(found))

    def _key(self, rung: Rung, scale: Scale, **how: Any) -> str:
        recipe = self.recipe(rung, scale)
        if (content := self._content(recipe)) is not None:
            how["content"] = content
        return key_of(recipe.to_dict(), within=self.within(rung, scale), launch=rung.launch, **how)

    def _content(self, recipe: Recipe) -> str | None:
        """As of `contents`, read once: rungs are compared by what there was when the ladder began."""
        named = (recipe.model, recipe.tokenizer, recipe.data.source)
        if named not in self._contents:
            self._contents[named] = contents(recipe)
        return self._contents[named]

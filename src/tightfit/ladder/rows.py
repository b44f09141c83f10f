"""Results of a ladder: rows in an append-only file, a JSON object a line.

An interrupted ladder loses at most the rung that ran. A line that cannot be read is named and skipped: the rest still
counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError

from tightfit.devices import Device, listed_device
from tightfit.errors import ReportError
from tightfit.ladder.rungs import Launch, launch_refusals
from tightfit.recipe import Recipe

RESULTS = "results.jsonl"
OURS = "tightfit"
Status = Literal["done", "out-of-memory", "refused", "timed-out", "killed", "failed"]
FINAL_OUTCOMES: tuple[Status, ...] = ("done", "out-of-memory", "refused")
"""Outcomes that are not tried again when a ladder goes on."""
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Machine(BaseModel, frozen=True):
    """The machine that a rung ran on. units: multiprocessors or cores. versions: of libraries, by name."""

    device: str
    kind: str
    memory_bytes: int
    units: int = 0
    driver: str | None = None
    versions: Mapping[str, str] = {}

    def refusals(self, recipe: Recipe, launch: Launch) -> list[str]:
        """Reasons why a rung's recipe or its launch cannot serve here, as far as the device is known."""
        if self.kind == "cpu":
            device = Device(kind="cpu", name=self.device, memory_bytes=self.memory_bytes)
            return [*launch_refusals(launch, gpus=0), *recipe.refusals(device)]
        card = listed_device(self.device)
        return [] if card is None else recipe.refusals(card)


class Row(BaseModel, frozen=True):
    """A rung as it was measured or predicted, or why it was not.

    key: the input fingerprint. reason: a sentence, where the status is not `done`. limit: seconds that it was given.
    samples: of a step. peak_allocated, peak_reserved, context: bytes; context is None on a processor.
    notes: sentences, such as what the plan chose.
    """

    ladder: str
    rung: str
    scale: str
    key: str
    status: Status = "done"
    reason: str = ""
    date: str = ""
    limit: Seconds = 0.0
    samples: Count = 0
    peak_allocated: Count = 0
    peak_reserved: Count = 0
    context: Count | None = None
    notes: tuple[str, ...] = ()

    @property
    def median_seconds(self) -> float:
        """Seconds of a step; 0 where there are none."""
        raise NotImplementedError

    @property
    def samples_per_second(self) -> float:
        """0 where there are no figures."""
        return self.samples / self.median_seconds if self.median_seconds else 0.0

    @property
    def driver_bytes(self) -> int:
        """The process's bytes as the driver reports them: context and all that the allocator holds."""
        return self.peak_reserved + (self.context or 0)


class Measured(Row, frozen=True):
    """A rung as it ran, or did not.

    recipe: resolved where it ran, as asked where not. commit: of tightfit's code, where a checkout of it ran.
    memory: bytes that the GPU was cut down to; None where it was whole.
    seconds: wall seconds of each timed step. losses: of every step from the first. tokens: of a step, 0 for images.
    round: how often it had been measured before, since its steps were not to be trusted.
    """

    kind: Literal["measured"] = "measured"
    runner: str
    machine: Machine
    recipe: Mapping[str, Any]
    commit: str | None = None
    memory: Count | None = None
    seconds: tuple[Seconds, ...] = ()
    losses: tuple[FiniteFloat, ...] = ()
    tokens: Count = 0
    round: Count = 0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds) if self.seconds else 0.0

    @property
    def quartiles(self) -> tuple[float, float]:
        """The seconds between which half of the timed steps lie; zeros where there are none."""
        if len(self.seconds) < 2:
            return self.median_seconds, self.median_seconds
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def is_steady(self) -> bool:
        """Whether half of its timed steps lie close together."""
        low, high = self.quartiles
        return high <= STEADY_RATIO * low


STEADY_RATIO = 1.25
"""The ratio of a steady rung's quartiles, at most."""

FAR_OFF = 10.0
"""Factor by which a rung is faster, or slower, than both its neighbours, from which on it is measured again."""


def is_far_off(rate: float, beside: Sequence[float]) -> bool:
    """Whether a rung's samples a second are far off those of all its neighbours."""
    return bool(beside) and (rate > FAR_OFF * max(beside) or FAR_OFF * rate < min(beside))


def all_rounds(rows: Sequence[Measured]) -> Measured | None:
    """The newest measurement of a rung with the timed steps of every round that came to figures; None where it has not
    run. rows: of one fingerprint, in the order in which they were written."""
    first = max((number for number, row in enumerate(rows) if not row.round), default=0)
    done = [row for row in rows[first:] if row.status == "done"]
    if not done:
        return rows[-1] if rows else None
    steps = tuple(seconds for row in done for seconds in row.seconds)
    return done[-1].model_copy(update={"seconds": steps, "round": rows[-1].round})


class Predicted(Row, frozen=True):
    """A rung as the planner predicts it for a device.

    fits: yes, with-retries, tight or no; empty where nothing was predicted.
    calibrated: by figures measured on the device.
    """

    kind: Literal["predicted"] = "predicted"
    device: str
    fits: str = ""
    step_seconds: Seconds = 0.0
    calibrated: bool = False
    versions: Mapping[str, str] = {}

    @property
    def median_seconds(self) -> float:
        return self.step_seconds


AnyRow = TypeVar("AnyRow", Measured, Predicted)

ROW: TypeAdapter[Measured | Predicted] = TypeAdapter(Annotated[Measured | Predicted, Field(discriminator="kind")])


@dataclass
class Rows:
    """Every row of a file, in the order in which they were written. skipped: a sentence for each line that is none."""

    measured: list[Measured] = field(default_factory=list)
    predicted: list[Predicted] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        if isinstance(row, Measured):
            self.measured.append(row)
        elif isinstance(row, Predicted):
            self.predicted.append(row)


def input_fingerprint(recipe: Mapping[str, Any], **how: Any) -> str:
    """A digest of a recipe's fields, the machine and how it is run: results with the same one can be compared."""
    where = ("output_dir", "cache_dir", "report_to", "logging_steps")
    values = {name: value for name, value in recipe.items() if name not in where}
    text = json.dumps({"recipe": values, **how}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def append(path: Path, row: Row | Mapping[str, Any]) -> None:
    """Add a row that reaches the disk. Raises OSError."""
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        # a line that was cut off stays a line of its own
        start = b"\n" if size and file.read(1) != b"\n" else b""
        file.write(start + TypeAdapter(Any).dump_json(row) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> Rows:
    """The rows of a file; none where there is no such file. Raises ReportError where it cannot be read."""
    rows = Rows()
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror or error})") from None
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            try:
                rows.add(ROW.validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                reason = ": ".join([*map(str, first["loc"]), first["msg"]])
                rows.skipped.append(f"{path}:{number}: this line is no result and is left out ({reason})")
    return rows

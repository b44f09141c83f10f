"""What came out of a ladder: rows in an append-only file, a JSON object a line.

A row is written whole, by one write, so that an interrupted ladder loses at most the rung that ran. A line that cannot
be read is named and skipped: the rest still counts.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from tightfit.errors import ReportError

RESULTS = "results.jsonl"
OURS = "tightfit"
Status = Literal["done", "out-of-memory", "refused", "timed-out", "killed", "failed"]
FINAL: tuple[Status, ...] = ("done", "out-of-memory", "refused")
"""What is not tried again when a ladder goes on."""

OF_SOME: Mapping[str, tuple[str, ...]] = {
    "accelerate": ("hf-trainer", "liger"), "bitsandbytes": ("hf-trainer", "liger"), "liger-kernel": ("liger",),
    "lightning": ("lightning",),
}  # fmt: skip
"""Libraries that the figures of some runners alone depend on; those of any other library are of all runners."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a figure depends on besides the recipe and the code. versions: of libraries, by name."""

    device: str
    kind: str
    memory_bytes: int
    units: int = 0
    driver: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def seen_by(self, runner: str) -> Machine:
        """The machine with the libraries alone that a runner's figures depend on."""
        return replace(self, versions={library: version for library, version in self.versions.items()
                                       if runner in OF_SOME.get(library, (runner,))})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A rung as it ran, or did not.

    key: a digest of what was run, see `key_of`. recipe: resolved where it ran, as asked where not.
    reason: a sentence, where the status is not `done`. limit: seconds that it was given.
    memory: bytes that the GPU was cut down to; None where it was whole.
    seconds: wall seconds of each timed step. samples, tokens: of a step; tokens are 0 where a model reads images.
    losses: of every step from the first. peak_allocated, peak_reserved, context: bytes; context is None on a processor.
    notes: sentences, such as what the plan chose.
    """

    ladder: str
    rung: str
    runner: str
    scale: str
    key: str
    status: Status
    machine: Machine
    recipe: Mapping[str, Any]
    date: str
    commit: str | None = None
    reason: str = ""
    limit: float = 0.0
    memory: int | None = None
    seconds: tuple[float, ...] = ()
    samples: int = 0
    tokens: int = 0
    losses: tuple[float, ...] = ()
    peak_allocated: int = 0
    peak_reserved: int = 0
    context: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def median_seconds(self) -> float:
        """0 where it did not run."""
        return statistics.median(self.seconds) if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.median_seconds if self.seconds else 0.0

    @property
    def driver_bytes(self) -> int:
        """What the driver would report for the process: context and all that the allocator holds."""
        return self.peak_reserved + (self.context or 0)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A rung as the planner sees it on a device.

    key: a digest of what was predicted and of all that it depends on, see `Climb.prediction_key`.
    fits: yes, with-retries or no; empty where nothing was predicted, and `status` and `reason` say why.
    limit: seconds that it was given. date, versions: when it was made, and by which libraries.
    """

    ladder: str
    rung: str
    scale: str
    key: str
    device: str
    fits: str = ""
    status: Status = "done"
    reason: str = ""
    limit: float = 0.0
    step_seconds: float = 0.0
    calibrated: bool = False
    peak_allocated: int = 0
    peak_reserved: int = 0
    context: int = 0
    samples: int = 0
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def driver_bytes(self) -> int:
        return self.peak_reserved + self.context

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.step_seconds if self.step_seconds else 0.0


Row = Measured | Predicted
KINDS: dict[str, type[Measured] | type[Predicted]] = {"measured": Measured, "predicted": Predicted}


@dataclass
class Rows:
    """Every row of a file, in the order in which they were written. skipped: a sentence for each line that is none."""

    measured: list[Measured] = field(default_factory=list)
    predicted: list[Predicted] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        if isinstance(row, Measured):
            self.measured.append(row)
        else:
            self.predicted.append(row)

    def newest(self, key: str, machine: Machine) -> Measured | None:
        """The last measurement of a key on a machine, by the same libraries; None where there is none."""
        return next((row for row in reversed(self.measured) if row.key == key
                     and row.machine.seen_by(row.runner) == machine.seen_by(row.runner)), None)

    def prediction(self, key: str, device: str) -> Predicted | None:
        """The last prediction of a key for a device; None where there is none."""
        return next((row for row in reversed(self.predicted) if (row.key, row.device) == (key, device)), None)


def key_of(recipe: Mapping[str, Any], **how: Any) -> str:
    """A digest of a recipe's fields and of how it was run: the same for what can be compared, and only for that."""
    where = ("output_dir", "cache_dir", "report_to", "logging_steps")
    values = {name: value for name, value in recipe.items() if name not in where}
    text = json.dumps({"recipe": values, **how}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def append(path: Path, row: Row) -> None:
    """Add a row, in one write that reaches the disk. Raises OSError."""
    kind = next(name for name, made in KINDS.items() if isinstance(row, made))
    line = json.dumps({"kind": kind, **asdict(row)}, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a line that was cut off stays a line of its own
            line = "\n" + line
        data = line.encode()
        if os.write(descriptor, data) != len(data):
            os.ftruncate(descriptor, size)
            raise OSError(28, os.strerror(28))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> Rows:
    """The rows of a file; none where there is no such file.

    Raises ReportError where it cannot be read at all: what is no regular file, and bytes that are no text.
    """
    rows = Rows()
    try:
        if not path.exists():
            return rows
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for who writes into it
            raise ReportError(f"{path}: cannot be read (it is no regular file); remove it, or write another "
                              "output_dir=...")
        content = path.read_bytes()
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror or error})") from None
    for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.add(_row(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            reason = " ".join(str(error).split())[:120]
            rows.skipped.append(f"{path}:{number}: this line is no result and is left out ({reason})")
    if rows.skipped and not (rows.measured or rows.predicted) and not _is_text(content):
        raise ReportError(f"{path}: holds no results of a ladder; remove it, or write another output_dir=...")
    return rows


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _row(values: dict[str, Any]) -> Row:
    kind = values.pop("kind")
    known = {each.name for each in fields(KINDS[kind])}
    values = {name: tuple(value) if isinstance(value, list) else value
              for name, value in values.items() if name in known}
    row: Row = _adapter(kind).validate_python(values)
    _check(row)
    return row


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(KINDS[kind])


NUMBERS = ("peak_allocated", "peak_reserved", "samples", "tokens", "step_seconds", "limit", "context")


def _check(row: Row) -> None:
    """That what is counted with is a number, and what is read is text."""
    for name in NUMBERS:
        value = getattr(row, name, 0) or 0  # the context may not be known
        if not _is_finite(value) or value < 0:
            raise ValueError(f"{name} is {value!r}")
    for name in ("ladder", "rung", "scale", "key", "reason"):
        if not isinstance(getattr(row, name), str):
            raise ValueError(f"{name} is {getattr(row, name)!r}")
    series: Iterable[Any] = (*row.seconds, *row.losses) if isinstance(row, Measured) else ()
    if not all(map(_is_finite, series)):
        raise ValueError("seconds and losses should be finite numbers")
    if isinstance(row, Measured) and row.status == "done" and not (row.seconds and min(row.seconds) > 0 < row.samples):
        raise ValueError("a rung that is done has seconds and samples")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

"""A trace as a file: gzipped lines of JSON, read and written a block at a time, large ones sampled.

    {"format": "tightfit-trace", "version": 2, "origin": "measured", "unseen": [...], "notes": [...]}
    {"spans": {"name": [...], "start": [...], ...}}
    {"ops": {"name": [0, 1, 0], "tick": [1, 2, 3], ...}, "values": ["aten.mm.default", ...]}
    {"allocations": {"born": [...], ...}, "values": [...]}
    {"end": {"spans": 9, "ops": 972, "allocations": 1073}}

A block holds up to BLOCK records as columns. Names, formats and shapes stand in the block's own `values`, and the
columns hold their indices there, so that nothing has to be remembered from one block to the next. The last line tells
a whole file from a truncated one.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import numpy as np

from tightfit.errors import ReportError
from tightfit.files import replacing
from tightfit.trace import Allocation, Category, Op, OpClass, Phase, Place, Span, Stream, Trace, UntracedMemory

T = TypeVar("T", Op, Allocation, Span)

FORMAT = "tightfit-trace"
VERSION = 2
BLOCK = 4096
LONGEST_LINE = 64 << 20
"""Bytes of a line that is still read: a block has a few hundred kilobytes."""

KINDS: dict[str, type[Any]] = {"spans": Span, "ops": Op, "allocations": Allocation}
INDEXED = {"name", "module", "op", "dtype", "shape", "shapes", "phase", "op_class", "category", "place", "pinned",
           "stream", "after"}  # fmt: skip
"""Columns that hold indices into the block's `values`."""
ENUMS = {"phase": Phase, "op_class": OpClass, "category": Category, "place": Place, "stream": Stream}
COUNTS = {"tick", "start", "stop", "step", "times", "born", "died", "category_since", "bytes", "flops",
          "bytes_read", "bytes_written", "kernels"}  # fmt: skip
NEVER_NEGATIVE = COUNTS - {"tick", "start", "stop", "born", "died", "category_since"}
MAY_BE_NONE = {"died", "seconds"}
LARGEST_COUNT = 1 << 62
SAMPLED = "the trace is sampled"
"""How a note begins that says what was left out."""


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace, whole or not at all. Raises OSError, and ValueError for seconds that are no finite number."""
    with replacing(path) as temporary, gzip.open(temporary, "wt", encoding="utf-8", compresslevel=5) as file:
        _write(file, {"format": FORMAT, "version": VERSION, "origin": trace.origin,
                      "unseen": [asdict(figure) for figure in trace.unseen], "notes": list(trace.notes),
                      "laid_out": trace.laid_out})
        records: dict[str, Sequence[Any]] = {
            "spans": trace.spans, "ops": trace.ops, "allocations": trace.allocations}
        for kind, all_of_them in records.items():
            for start in range(0, len(all_of_them), BLOCK):
                _write(file, _block(kind, all_of_them[start : start + BLOCK]))
        _write(file, {"end": {kind: len(all_of_them) for kind, all_of_them in records.items()}})


def sampling_notes(trace: Trace) -> list[str]:
    """Sentences on what was left out of a trace; none of one that is whole."""
    return [note for note in trace.notes if note.startswith(SAMPLED)]


def _write(file: IO[str], values: dict[str, Any]) -> None:
    json.dump(values, file, separators=(",", ":"), allow_nan=False)
    file.write("\n")


def _block(kind: str, records: Sequence[Any]) -> dict[str, Any]:
    indices: dict[Any, int] = {}
    columns = {}
    for name in (f.name for f in fields(KINDS[kind])):
        column = [getattr(record, name) for record in records]
        columns[name] = [indices.setdefault(v, len(indices)) for v in column] if name in INDEXED else column
    return {kind: columns, "values": list(indices)}


def load_trace(path: Path, limit: int | None = None) -> Trace:
    """Read a trace. limit: the most ops, and the most allocations, to keep; of more, the longest ops and the largest
    allocations are kept, and the trace's notes say what share was left out. Memory is bounded by it. Raises ReportError
    for a file that is not there, is none of these, is damaged, or of a newer version.
    """
    try:
        with gzip.open(path, "rb") as file:
            return _read(file, path, limit)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        if isinstance(error, gzip.BadGzipFile) and "Not a gzipped file" in str(error):
            raise _foreign(path) from None
        raise _damaged(path, "it ends too early" if isinstance(error, EOFError) else str(error)) from None
    except OSError as error:
        raise ReportError(f"{path}: the trace cannot be read ({error.strerror or error})") from None


def _read(file: gzip.GzipFile, path: Path, limit: int | None) -> Trace:
    lines = _lines(file, path)
    trace = _header(next(lines, None), path)
    ops: _Largest[Op] = _Largest(limit, _op_sizes)
    allocations: _Largest[Allocation] = _Largest(limit, lambda columns: np.array(columns["bytes"], dtype=float))
    counts, ended = dict.fromkeys(KINDS, 0), False
    for number, line in enumerate(lines, start=2):
        try:
            if ended:
                raise ValueError("something stands behind its end")
            kind = next(iter(line))
            if kind == "end":
                ended = True
                if {name: line["end"][name] for name in KINDS} != counts:
                    raise ValueError("it holds other numbers of records than it says")
                continue
            columns, rows = _columns(kind, line)
            counts[kind] += rows
            if kind == "spans":
                trace.spans.extend(_records(Span, columns, range(rows)))
            elif kind == "ops":
                ops.add(columns, rows, partial(_records, Op, columns))
            else:
                allocations.add(columns, rows, partial(_records, Allocation, columns))
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, StopIteration, OverflowError) as error:
            raise _damaged(path, f"line {number}: {error}") from None
        if limit is not None and len(trace.spans) > limit:
            raise ReportError(f"{path}: it holds more than {limit:,} spans, and a step has a few for each micro-batch")
    if not ended:
        raise _damaged(path, "it ends too early")
    trace.ops, trace.allocations = ops.records, allocations.records
    trace.notes += [*ops.notes("ops", "time", "longest"), *allocations.notes("allocations", "bytes", "largest")]
    return trace


def _lines(file: gzip.GzipFile, path: Path) -> Iterator[Any]:
    number = 0
    while raw := file.readline(LONGEST_LINE):
        number += 1
        if not raw.endswith(b"\n"):
            raise _foreign(path) if number == 1 else _damaged(path, f"line {number} is not whole")
        try:
            yield json.loads(raw, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise _foreign(path) if number == 1 else _damaged(path, f"line {number}: {error}") from None


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no finite number")


def _header(line: Any, path: Path) -> Trace:
    """The trace without its records."""
    if not isinstance(line, dict) or line.get("format") != FORMAT:
        raise _foreign(path)
    version = line.get("version")
    if version != VERSION:
        raise ReportError(f"{path}: the trace is of version {version!r}, and this tightfit reads version {VERSION}; "
                          "update tightfit, or read it with the one that wrote it")
    try:
        if line["origin"] not in ("predicted", "measured"):
            raise ValueError(f"origin {line['origin']!r}")
        unseen = [UntracedMemory(**{**each, "bytes": int(each["bytes"]), "name": str(each["name"]),
                            "source": str(each["source"])}) for each in line["unseen"]]
        return Trace(origin=line["origin"], unseen=unseen, notes=[str(note) for note in line["notes"]],
                     laid_out=bool(line["laid_out"]))
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise _damaged(path, f"line 1: {error}") from None


class _Columns(dict[str, list[Any]]):
    """A block's columns as they are written, and what the indices in some of them stand for."""

    meanings: dict[str, dict[int, Any]]


def _columns(kind: str, line: dict[str, Any]) -> tuple[_Columns, int]:
    """A block's columns, checked, and how many rows they have. Raises ValueError and its like."""
    made, values = line[kind], line["values"]
    columns = _Columns()
    columns.meanings = {}
    for name in (f.name for f in fields(KINDS[kind])):
        column = made[name]
        _check(name, column)
        if name in INDEXED:
            columns.meanings[name] = {index: _value(name, values[index]) for index in set(column)}
        columns[name] = column
    rows = {len(column) for column in columns.values()}
    if len(rows) != 1 or max(rows) > BLOCK:
        raise ValueError(f"columns of {sorted(rows)} records")
    return columns, rows.pop()


def _check(name: str, column: Any) -> None:
    """Raises ValueError for a column that holds anything but numbers of its kind."""
    kinds = set(map(type, column)) if isinstance(column, list) else {type(column)}
    if name in MAY_BE_NONE:
        kinds.discard(type(None))
    if not kinds <= ({int, float} if name == "seconds" else {int}):
        raise ValueError(f"{name} holds {', '.join(sorted(kind.__name__ for kind in kinds))}")
    numbers = [number for number in column if number is not None]
    lowest = 0 if name in NEVER_NEGATIVE or name in INDEXED or name == "seconds" else -LARGEST_COUNT
    if numbers and not (lowest <= min(numbers) and max(numbers) <= LARGEST_COUNT):
        raise ValueError(f"{name} lies outside what it can be")


def _value(name: str, value: Any) -> Any:
    if name in ENUMS:
        return ENUMS[name](value)
    if name == "shapes":
        return tuple(_shape(each) for each in value)
    if name in ("shape", "after"):
        return _shape(value)
    if name == "pinned" and isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{name} {value!r} is no text")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"{value!r} is no list of numbers")
    return tuple(value)


def _records(kind: type[T], columns: _Columns, chosen: Sequence[int]) -> list[T]:
    """The rows of those numbers as the records they are."""
    named = []
    for name, column in columns.items():
        meaning = columns.meanings.get(name)
        named.append([column[i] for i in chosen] if meaning is None else [meaning[column[i]] for i in chosen])
    return [kind(**dict(zip(columns, row, strict=True))) for row in zip(*named, strict=True)]


def _op_sizes(columns: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Seconds of ops; where they are not known, ops are ordered by their FLOPs and bytes."""
    seconds = np.array([s if s is not None else 0.0 for s in columns["seconds"]], dtype=float)
    work = sum(np.array(columns[name], dtype=float) for name in ("flops", "bytes_read", "bytes_written"))
    return np.where(seconds > 0, seconds, 1e-15 * work)


class _Largest(Generic[T]):
    """Records handed over a block at a time, of which the `limit` largest are kept, the first of equals; None keeps
    all."""

    def __init__(self, limit: int | None, sizes_of: Callable[[Mapping[str, Sequence[Any]]], np.ndarray]) -> None:
        if limit is not None and limit < 2:
            raise ValueError(f"limit: {limit} should be at least 2")
        self._limit, self._sizes_of = limit, sizes_of
        self._sizes = np.zeros(0)
        self.records: list[T] = []
        self.seen, self.total = 0, 0.0

    def add(self, columns: Mapping[str, Sequence[Any]], rows: int, records: Callable[[Sequence[int]], list[T]]) -> None:
        """Take a block. records: makes those of the given numbers."""
        self.seen += rows
        if self._limit is None:
            self.records += records(range(rows))
            return
        sizes = self._sizes_of(columns)
        self.total += float(sizes.sum())
        all_sizes = np.concatenate([self._sizes, sizes])
        kept = np.sort(np.argsort(-all_sizes, kind="stable")[: self._limit])
        held = len(self.records)
        self.records = [self.records[i] for i in kept[kept < held].tolist()] + records(
            (kept[kept >= held] - held).tolist())
        self._sizes = all_sizes[kept]

    def notes(self, of: str, unit: str, longest: str) -> list[str]:
        """A sentence on what was left out, or none."""
        gone = self.seen - len(self.records)
        if not gone:
            return []
        share = max(1 - float(self._sizes.sum()) / self.total, 0.0) if self.total else 0.0
        return [f"{SAMPLED}: {gone:,} of {self.seen:,} {of} were left out ({100 * gone / self.seen:.1f} %), with "
                f"{100 * share:.2g} % of their {unit}; the {longest} are all here"]


def _foreign(path: Path) -> ReportError:
    return ReportError(f"{path}: this is no trace of tightfit's; write a folder that `tightfit profile` made")


def _damaged(path: Path, reason: str) -> ReportError:
    return ReportError(f"{path}: the trace is damaged ({reason}); profile again")

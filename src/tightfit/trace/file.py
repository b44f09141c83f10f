"""A trace as a file: gzipped lines of JSON, read and written a block at a time.

    {"format": "tightfit-trace", "version": 3, "origin": "measured", "unseen": [...], "notes": [...]}
    {"spans": [{"name": "step 1", "start": 0, ...}, ...]}
    {"ops": [{"name": "aten.mm.default", "tick": 1, ...}, ...]}
    {"allocations": [{"born": 1, "died": null, ...}, ...]}
    {"end": {"spans": 9, "ops": 972, "allocations": 1073}}

A block holds up to BLOCK records, without the fields that have their default. The last line distinguishes a whole
file from a truncated one.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from tightfit.errors import ReportError
from tightfit.files import replacing
from tightfit.trace import Allocation, Op, Span, Trace, UntracedMemory

VERSION: Literal[3] = 3
BLOCK_SIZE = 4096
LONGEST_LINE = 64 << 20
"""Bytes of a line that is still read: a block has about a megabyte."""


class _Header(BaseModel):
    """A file's first line."""

    format: Literal["tightfit-trace"]
    version: Literal[3]
    origin: Literal["predicted", "measured"]
    unseen: list[UntracedMemory]
    notes: list[str]
    laid_out: bool


class _Line(BaseModel, extra="forbid"):
    """Any other line."""

    spans: list[Span] = []
    ops: list[Op] = []
    allocations: list[Allocation] = []
    end: dict[str, int] | None = None


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace, whole or not at all. Raises OSError, and ValueError for seconds that are no finite number."""
    header = _Header(format="tightfit-trace", version=VERSION, origin=trace.origin, unseen=trace.untraced,
                     notes=trace.notes, laid_out=trace.laid_out)
    records: dict[str, list[Any]] = {"spans": trace.spans, "ops": trace.ops, "allocations": trace.allocations}
    blocks: list[dict[str, Any]] = [{kind: all_of[start : start + BLOCK_SIZE]} for kind, all_of in records.items()
                                    for start in range(0, len(all_of), BLOCK_SIZE)]
    blocks.append({"end": {kind: len(all_of) for kind, all_of in records.items()}})
    lines = (_Line.model_construct(None, **block) for block in blocks)
    with replacing(path) as temporary, gzip.open(temporary, "wt", encoding="utf-8", compresslevel=5) as file:
        for line in (header, *lines):
            values = line.model_dump(mode="json", exclude_defaults=True)
            file.write(json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n")


def load_trace(path: Path) -> Trace:
    """Read a trace. Raises ReportError for a file that is not there, is none of these, is damaged, or of another
    version."""
    try:
        with gzip.open(path, "rb") as file:
            return _read(file, path)
    except EOFError:
        raise _damaged(path, "it ends too early") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise (_foreign(path) if "Not a gzipped file" in str(error) else _damaged(path, str(error))) from None
    except OSError as error:
        raise ReportError(f"{path}: the trace cannot be read ({error.strerror or error})") from None


def _read(file: gzip.GzipFile, path: Path) -> Trace:
    trace, number, end = _header(file.readline(LONGEST_LINE), path), 1, None
    while raw := file.readline(LONGEST_LINE):
        number += 1
        if end is not None or not raw.endswith(b"\n"):
            raise _damaged(path, f"line {number} is not whole" if end is None else "something stands behind its end")
        try:
            line = _Line.model_validate_json(raw, strict=True)
        except ValidationError as error:
            raise _damaged(path, f"line {number}: {wrong_fields(error)}") from None
        trace.spans += line.spans
        trace.ops += line.ops
        trace.allocations += line.allocations
        end = line.end
    if end is None:
        raise _damaged(path, "it ends too early")
    if end != {"spans": len(trace.spans), "ops": len(trace.ops), "allocations": len(trace.allocations)}:
        raise _damaged(path, "it holds other numbers of records than it says")
    return trace


def _header(raw: bytes, path: Path) -> Trace:
    """The trace without its records."""
    try:
        header = _Header.model_validate_json(raw)
    except ValidationError as error:
        wrong = {each["loc"]: each["input"] for each in error.errors()}
        if () in wrong or ("format",) in wrong:
            raise _foreign(path) from None
        if ("version",) in wrong:
            raise ReportError(f"{path}: the trace is of version {wrong['version',]!r}, and this tightfit reads version "
                              f"{VERSION}; update tightfit, or read it with the one that wrote it") from None
        raise _damaged(path, f"line 1: {wrong_fields(error)}") from None
    return Trace(origin=header.origin, untraced=header.unseen, notes=header.notes, laid_out=header.laid_out)


def wrong_fields(error: ValidationError) -> str:
    """The first few fields that are not as they should be, and why."""
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])


def _foreign(path: Path) -> ReportError:
    return ReportError(f"{path}: this is no trace of tightfit's; write a folder that `tightfit profile` made")


def _damaged(path: Path, reason: str) -> ReportError:
    return ReportError(f"{path}: the trace is damaged ({reason}); profile again")

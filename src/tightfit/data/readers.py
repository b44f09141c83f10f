"""Fields of the data that a recipe reads, and a reader for each kind of file: their values, row by row.

`Wanted` maps a recipe field (`TEXT`, `LABEL`, `TARGET`) to the name of the field in the data. The first one is the
text. Every reader raises DataError, naming the file and where in it, for what it cannot read.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tightfit.errors import DataError, cut, one_line, shown
from tightfit.recipe import Data

TEXT, PAIR, TARGET, LABEL = "data.text", "data.text_pair", "data.target", "data.label"
MESSAGES, PROMPT, COMPLETION = "data.messages", "data.prompt", "data.completion"
TEXTS = (TEXT, PAIR, TARGET, PROMPT, COMPLETION)
"""The recipe fields that name a field of the data, and those whose values are texts."""
INPUT, OUTPUT = "input", "output"
"""Fields of Alpaca's format beside `instruction`, which is read as `data.messages`: its input, and its response."""
TOOLS = "tools"
"""The functions that an assistant may call, as JSON schemas, beside `data.messages`. A prompt that is messages is read
as those too, with its completion."""
OPTIONAL = (INPUT, TOOLS)
"""Fields that rows may lack."""
LOSS_MASK = "loss_mask"
"""The stream of 0 and 1 for each token of the text: whether it counts in the loss, where not all do."""
SIDES = "sides"
"""The stream that says of each token of a pair of texts whose it is, see `Tokenizer.pairs`."""

Wanted = Mapping[str, str]
Row = tuple[Any, ...]
Reader = Callable[[Path, Wanted], Iterator[Row]]

CONVERT_ADVICE = "convert it to UTF-8"
FILE_SIGNATURES = {
    b"\x1f\x8b": ("compressed by gzip", "write the file that gunzip makes of it"),
    codecs.BOM_UTF32_LE: ("text in UTF-32", CONVERT_ADVICE),  # which begins as the next one does
    codecs.BOM_UTF16_LE: ("text in UTF-16", CONVERT_ADVICE),
    codecs.BOM_UTF16_BE: ("text in UTF-16", CONVERT_ADVICE),
}
"""Kinds of files by their first bytes, whatever their names say, and what to do with them."""


class MissingField(DataError):
    """Data without a field that is wanted. present: the fields that it has."""

    def __init__(self, message: str, present: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.present = tuple(present)


class HoldsMessages(DataError):
    """Prompts that are lists of messages, where texts are wanted."""


def named_fields(data: Data) -> Wanted | None:
    """The fields that the recipe itself names of conversations, or of prompts and completions; None where it names
    none."""
    if data.messages is not None:
        return {MESSAGES: data.messages, TOOLS: TOOLS}
    if data.prompt is not None or data.completion is not None:
        return {PROMPT: data.prompt or "prompt", COMPLETION: data.completion or "completion"}
    return None


def usual_fields(present: Iterable[str]) -> Wanted | None:
    """The fields of such data by their usual names, ShareGPT's and Alpaca's among them; None where it has none of
    them."""
    present = set(present)
    usual: tuple[dict[str, str], ...] = (
        {MESSAGES: "messages", TOOLS: TOOLS}, {PROMPT: "prompt", COMPLETION: "completion"},
        {MESSAGES: "conversations", TOOLS: TOOLS}, {MESSAGES: "instruction", INPUT: "input", OUTPUT: "output"},
    )  # fmt: skip
    return next((fields for fields in usual
                 if all(name in present for key, name in fields.items() if key not in OPTIONAL)), None)  # fmt: skip


def require_fields(wanted: Wanted, present: Iterable[str], origin: str) -> None:
    """Raises MissingField unless every wanted field is among `present`."""
    present = list(present)
    for key, field in wanted.items():
        if field not in present and key not in OPTIONAL:
            advice = "write it in every row" if key == OUTPUT else f"write {key}=<one of them>"
            raise MissingField(f"{key}: {origin} has no field {field!r}; it has {cut(', '.join(present), 500)}; "
                               f"{advice}", present)


def pick(row: Mapping[str, Any], wanted: Wanted, origin: str) -> Row:
    """The wanted values of one row, texts checked to be text."""
    if not all(field in row for field in wanted.values()):
        require_fields(wanted, row, origin)
    for key, field in wanted.items():
        if key in TEXTS and MESSAGES not in wanted and not isinstance(row[field], str):
            kind = HoldsMessages if key == PROMPT and isinstance(row[field], list) else DataError
            raise kind(f"{key}: field {field!r} of {origin} is {shown(row[field])}, not text; write "
                       f"{key}=<a field>")
    return tuple(row.get(field) for field in wanted.values())


def picked(rows: Iterable[Mapping[str, Any]], wanted: Wanted, name: str) -> Iterator[Row]:
    """The wanted values of each row of a table. Raises DataError, also for what only looks like one."""
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield tuple(map(_without_none, pick(row, wanted, f"{name} row {number}")))
    except ValueError as error:  # of Arrow, and of texts in no encoding
        raise DataError(f"data: {name} cannot be read behind row {number}: {one_line(error)}") from None


def _without_none(value: Any) -> Any:
    """A table's value, whose mappings have the names of every row's: without those that this one has nothing for."""
    if isinstance(value, Mapping):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def decode(raw: bytes, path: Path) -> str:
    """The text in a file's bytes. Raises DataError for an empty or binary file, or another encoding."""
    if not raw.strip():
        raise DataError(f"data: {path} is empty")
    if b"\0" in raw:
        raise DataError(f"data: {path} is a binary file; write a text, JSONL, CSV or Parquet file, or a folder of them")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"data: {path} is not UTF-8 text (byte {error.start}); convert it to UTF-8") from None


def read_text(path: Path, wanted: Wanted) -> Iterator[Row]:
    """A text file is one document, and has no other field."""
    _, *others = (repr(field) for key, field in wanted.items() if key not in OPTIONAL)
    if others:
        raise DataError(f"data: {path} is a text file, which has no field {' and '.join(others)}; write a JSONL, CSV "
                        "or Parquet file")
    yield (decode(path.read_bytes(), path), *(None for _ in [*wanted][1:]))


def read_json(path: Path, wanted: Wanted) -> Iterator[Row]:
    """One JSON object a line, blank lines passed over; or one array of objects, which is read as a whole."""
    with path.open("rb") as file:
        unit = "row" if file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[") else "line"
        file.seek(0)
        rows: Iterable[tuple[int, Any]] = (
            enumerate(_parsed(file.read(), f"{path}, which begins as an array,"), 1) if unit == "row" else
            ((number, _parsed(line, f"{path} line {number}")) for number, line in enumerate(file, 1) if line.strip()))
        for number, row in rows:
            yield _object(row, wanted, f"{path} {unit} {number}", unit)


def _parsed(raw: bytes, origin: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"data: {origin} is not JSON in UTF-8: {error}") from None


def _object(row: Any, wanted: Wanted, origin: str, unit: str) -> Row:
    """The wanted values of a JSON object. unit: what the file has one object of."""
    if not isinstance(row, dict):
        raise DataError(f"data: {origin} is not an object such as " '{"text": ...}; write one a ' + unit)
    values = pick(row, wanted, origin)
    try:
        for value in values:
            str(value).encode()  # JSON can escape half of a character, which no encoding can write
    except (ValueError, RecursionError) as error:
        raise DataError(f"data: {origin} is not JSON in UTF-8: {error}") from None
    return values


def read_csv(path: Path, wanted: Wanted, delimiter: str = ",") -> Iterator[Row]:
    """Separated values under a line of names; values are texts, as many in each row as there are names."""
    csv.field_size_limit(2**31 - 1)  # the default refuses documents above 128 KiB; a `long` of Windows holds no more
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines: list[str] = []  # of the row that is read
        rows = csv.DictReader(_remembered(file, lines), delimiter=delimiter)
        try:
            require_fields(wanted, rows.fieldnames or (), str(path))
            if twice := [field for field in wanted.values() if list(rows.fieldnames or ()).count(field) > 1]:
                raise DataError(f"data: {path} names two fields {twice[0]!r} in its first line; give each its own name")
            names = len(rows.fieldnames or ())
            lines.clear()
            for row in rows:
                if len(lines) > 1 and _ends_in_quote(lines, delimiter):
                    raise DataError(f"data: {path} line {rows.line_num + 1 - len(lines)} opens a double quote that is "
                                    "closed nowhere; close it, or double it where the value holds one")
                lines.clear()
                short = sum(value is None for value in row.values())
                if short or None in row:
                    raise DataError(f"data: {path} line {rows.line_num} has {names - short + len(row.get(None) or ())} "
                                    f"values, and its first line names {names} fields; put a value that holds a "
                                    f"{delimiter!r} in double quotes")
                yield pick(row, wanted, f"{path} line {rows.line_num}")
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"data: {path} is not CSV in UTF-8 behind line {rows.line_num}: {error}") from None


def _remembered(lines: Iterable[str], kept: list[str]) -> Iterator[str]:
    """The lines, each added to `kept` as it is read."""
    for line in lines:
        kept.append(line)
        yield line


def _ends_in_quote(lines: list[str], delimiter: str) -> bool:
    """Whether a row ends in a quoted value that is still open, which takes in all lines that follow."""
    try:
        [*csv.reader(lines, delimiter=delimiter, strict=True)]
    except csv.Error as error:
        return "unexpected end" in str(error)
    return False


def read_parquet(path: Path, wanted: Wanted) -> Iterator[Row]:
    """A Parquet file, read a batch of rows at a time."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            require_fields(wanted, file.schema_arrow.names, str(path))
            columns = [field for field in wanted.values() if field in file.schema_arrow.names]
            batches = file.iter_batches(columns=columns, batch_size=1024)
            yield from picked((row for batch in batches for row in batch.to_pylist()), wanted, str(path))
    except ArrowException as error:
        raise DataError(f"data: {path} is not a Parquet file: {one_line(error)}") from None


READERS: dict[str, Reader] = {
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
    ".parquet": read_parquet,
}
"""Readers by a file name's ending; a file of any other name is read as text.

Lines of JSON and separated values are read here and not by `datasets`, whose readers take the fields of the first ten
megabytes, or the types of the first rows, for those of all, and name no line where that fails."""


def read_file(path: Path, wanted: Wanted) -> Iterator[Row]:
    """The rows of one file. Raises DataError, also for a file that is empty or has no rows."""
    reader = READERS.get(path.suffix.lower(), read_text)
    try:
        if path.stat().st_size == 0:
            raise DataError(f"data: {path} is empty")
        with path.open("rb") as file:
            first = file.read(max(map(len, FILE_SIGNATURES)))
        for beginning, (found, instead) in FILE_SIGNATURES.items():
            if first.startswith(beginning):
                raise DataError(f"data: {path} is {found}; {instead}")
        empty = True
        for row in reader(path, wanted):
            empty = False
            yield row
    except OSError as error:
        raise DataError(f"data: {path} cannot be read: {error.strerror or one_line(error)}") from None
    if empty:
        raise DataError(f"data: {path} has no rows")

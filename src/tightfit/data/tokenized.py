"""A corpus as token ids on disk: split, encoded and cached."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.data.caching import cached, digest
from tightfit.data.corpora import Corpus
from tightfit.data.readers import LABEL, TEXTS, Row, Wanted
from tightfit.data.splitting import held_out, split_text
from tightfit.data.stream import StreamWriter, TokenStream
from tightfit.data.tokenizing import Tokenizer
from tightfit.errors import DataError
from tightfit.tasks import Array

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many documents of how many are finished."""

PARTS = ("train", "evaluation")
BATCH_CHARACTERS = 1 << 21
"""Text to encode between two calls of the progress."""


@dataclass(frozen=True)
class Split:
    """A corpus' rows, each in the training or the held-out part.

    Where rows are text alone, empty ones are left out, and a single one is cut in two.
    """

    corpus: Corpus
    wanted: Wanted
    fraction: float

    @property
    def key(self) -> str:
        """Names the parts' content."""
        fields = (part for pair in self.wanted.items() for part in pair)
        return digest([self.corpus.fingerprint, repr(self.fraction), *fields])

    @cached_property
    def chosen(self) -> Array:
        """Bool (rows,): which rows are held out. Reads the corpus once."""
        return held_out(sum(1 for _ in self._rows()), self.fraction)

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Each row with its part's place in `PARTS`."""
        if len(self.chosen) == 1 and len(self.wanted) == 1 and self.fraction:
            ((text,),) = self._rows()
            yield from enumerate((part,) for part in split_text(text, self.fraction) if part)
        else:
            yield from zip(self.chosen.astype(int).tolist(), self._rows(), strict=True)

    def training_texts(self, progress: Progress | None = None) -> Iterator[str]:
        """Every text of the training part."""
        columns = [i for i, key in enumerate(self.wanted) if key in TEXTS]
        for number, (part, row) in enumerate(self.rows(), 1):
            if part == 0:
                yield from (row[i] for i in columns)
            if progress is not None and number <= len(self.chosen):  # not more, where one document is cut in two
                progress("training the tokenizer", number, len(self.chosen))

    def _rows(self) -> Iterator[Row]:
        alone = len(self.wanted) == 1
        return (row for row in self.corpus.rows() if not alone or row[0].strip())


@dataclass(frozen=True)
class Part:
    """One part of a tokenized corpus, by recipe field: streams of token ids, and the classes, int64 (documents,)."""

    streams: dict[str, TokenStream]
    classes: Array | None


def tokenize(
    split: Split, tokenizer: Tokenizer, cache_dir: Path, num_labels: int, progress: Progress | None = None
) -> tuple[Part, Part, tuple[str, ...]]:
    """The training part, the held-out part (maybe empty) and the classes' names, from the cache where it has them.

    Raises DataError for data without a single document, and for labels numbered beyond `num_labels`.
    """

    def fill(folder: Path) -> None:
        if not len(split.chosen):
            raise DataError(f"data: {split.corpus.name} holds no text")
        ids, names = _classes(split, num_labels)
        (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")
        parts = _encode(folder, split, tokenizer, progress)
        for part, name in enumerate(PARTS):
            if LABEL in split.wanted:
                np.save(folder / name / f"{LABEL}.npy", ids[parts == part])

    key = digest(["tokens 1", split.key, tokenizer.fingerprint])
    return cached(cache_dir / "tokens" / key, fill, lambda folder: _read(folder, split.wanted))


def _read(folder: Path, wanted: Wanted) -> tuple[Part, Part, tuple[str, ...]]:
    names = json.loads((folder / "names.json").read_text(encoding="utf-8"))
    if not isinstance(names, list):
        raise ValueError("names.json should hold a list")
    train, evaluation = (_read_part(folder / part, wanted) for part in PARTS)
    return train, evaluation, tuple(names)


def _read_part(folder: Path, wanted: Wanted) -> Part:
    streams = {key: TokenStream(folder / key) for key in wanted if key in TEXTS}
    for stream in streams.values():
        stream.check()
    return Part(streams, np.load(folder / f"{LABEL}.npy") if LABEL in wanted else None)


def _classes(split: Split, num_labels: int) -> tuple[Array, list[str]]:
    """The rows' classes, int64 (rows,), and their names; both empty where the task reads none."""
    if LABEL not in split.wanted:
        return np.zeros(0, dtype=np.int64), []
    place = list(split.wanted).index(LABEL)
    ids, names = class_ids([row[place] for _, row in split.rows()], split.wanted[LABEL], num_labels)
    return np.array(ids, dtype=np.int64), names


def class_ids(labels: list[Any], field: str, num_labels: int) -> tuple[list[int], list[str]]:
    """Labels as ids, and the names that the ids stand for: whole numbers are ids already, texts are sorted.

    Raises DataError for other labels, and for numbers of `num_labels` or more, before it counts up to them.
    """
    numbers = all(isinstance(v, int) or (isinstance(v, str) and v.strip().isdecimal()) for v in labels)
    if numbers:
        ids = [int(v) for v in labels]
        if min(ids) < 0:
            raise DataError(f"{LABEL}: field {field!r} holds {min(ids)}; classes are numbered from 0")
        if max(ids) >= num_labels:
            needed = max(ids) + 1
            raise DataError(f"{LABEL}: field {field!r} holds {max(ids)}, so it has {needed} classes and the model "
                            f"{num_labels}; number the classes from 0, or write num_labels={needed}")  # fmt: skip
        return ids, [str(i) for i in range(max(ids) + 1)]
    for number, label in enumerate(labels, 1):
        if not isinstance(label, str):
            raise DataError(f"{LABEL}: field {field!r} of row {number} is {label!r}; write a whole number or a text")
    names = sorted(set(labels))
    places = {name: place for place, name in enumerate(names)}
    return [places[label] for label in labels], names


def _encode(folder: Path, split: Split, tokenizer: Tokenizer, progress: Progress | None) -> Array:
    """Write the rows' streams into a folder for each part; the rows' parts, int64 (rows,)."""
    columns = {column: key for column, key in enumerate(split.wanted) if key in TEXTS}
    writers = {
        column: [StreamWriter(folder / part / key, tokenizer.vocab_size) for part in PARTS]
        for column, key in columns.items()
    }
    parts: list[int] = []
    total = len(split.chosen)
    for batch in _batches(split.rows(), columns):
        here = [part for part, _ in batch]
        for column in columns:
            encoded = tokenizer.encode_batch([row[column] for _, row in batch])
            for part, writer in enumerate(writers[column]):
                writer.extend([ids for place, ids in zip(here, encoded, strict=True) if place == part])
        if progress is not None and len(parts) < total:
            progress("tokenizing", min(len(parts) + len(batch), total), total)
        parts += here
    for writer in chain.from_iterable(writers.values()):
        writer.close()
    return np.array(parts, dtype=np.int64)


def _batches(rows: Iterable[tuple[int, Row]], columns: Iterable[int]) -> Iterator[list[tuple[int, Row]]]:
    """Rows in groups of about `BATCH_CHARACTERS`."""
    waiting: list[tuple[int, Row]] = []
    size = 0
    for item in rows:
        waiting.append(item)
        size += sum(len(item[1][column]) for column in columns)
        if size >= BATCH_CHARACTERS:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting

"""A corpus as token ids on disk: documents as one long run of them, encoded and cached."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.data.caching import cached
from tightfit.data.readers import LABEL, LOSS_MASK, MESSAGES, PAIR, PROMPT, SIDES, TARGET, TEXT, TEXTS, Row, Wanted
from tightfit.data.splitting import Progress, Split
from tightfit.data.tokenizing import SIDES_SIZE, Tokenizer
from tightfit.errors import DataError, shown
from tightfit.files import digest
from tightfit.model_facts import ModelFacts
from tightfit.tasks import Array, Task

PARTS = ("train", "evaluation")
BATCH_CHARACTERS = 1 << 21
"""Text to encode between two calls of the progress."""

TOKENS_FILE, STARTS_FILE, COUNTS_FILE = "tokens.bin", "starts.npy", "counts.npy"


def _dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenStream:
    """Documents end to end, read from a folder that `StreamWriter` filled. Pickles as the folder's name.

    tokens: uint16 or uint32 (tokens,). starts: int64 (documents + 1,), the last one being the number of tokens.
    counts: int64 (vocabulary,), how often each token occurs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStream, (self.folder,)

    @cached_property
    def tokens(self) -> Array:
        dtype = _dtype(len(self.counts))
        if self.starts[-1] == 0:
            return np.zeros(0, dtype)  # an empty file cannot be mapped
        return np.asarray(np.memmap(self.folder / TOKENS_FILE, dtype, "r"))

    @cached_property
    def starts(self) -> Array:
        return np.asarray(np.load(self.folder / STARTS_FILE))

    @cached_property
    def counts(self) -> Array:
        return np.asarray(np.load(self.folder / COUNTS_FILE))

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    def __len__(self) -> int:
        return int(self.starts[-1])

    def document(self, index: int, limit: int | None = None) -> Array:
        """The first `limit` tokens of a document, int64."""
        start, stop = int(self.starts[index]), int(self.starts[index + 1])
        if limit is not None:
            stop = min(stop, start + limit)
        return self.tokens[start:stop].astype(np.int64)


class StreamWriter:
    """Appends documents to a folder; `close` finishes its files."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.lengths: list[int] = []
        (folder / TOKENS_FILE).touch()

    def extend(self, documents: Sequence[Array]) -> None:
        """Append documents, each the ids (int64, 1-d) of one."""
        if not documents:
            return
        tokens = np.concatenate(documents)
        self.counts += np.bincount(tokens, minlength=len(self.counts))
        self.lengths += [len(d) for d in documents]
        with (self.folder / TOKENS_FILE).open("ab") as file:
            file.write(tokens.astype(_dtype(len(self.counts))).tobytes())

    def close(self) -> None:
        """Finish the files. Without this call the folder is no stream."""
        starts = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=starts[1:])
        np.save(self.folder / STARTS_FILE, starts)
        np.save(self.folder / COUNTS_FILE, self.counts)


@dataclass(frozen=True)
class Part:
    """One part of a tokenized corpus, by recipe field: streams of token ids, and the classes, int64 (documents,)."""

    streams: dict[str, TokenStream]
    classes: Array | None

    def renumbered(self, numbers: list[int]) -> Part:
        """The part with class n as `numbers[n]`; as it is where there are none."""
        return replace(self, classes=np.array(numbers)[self.classes]) if numbers and self.classes is not None else self


def tokenize(
    split: Split, tokenizer: Tokenizer, cache_dir: Path, progress: Progress | None = None
) -> tuple[Part, Part, tuple[str, ...]]:
    """The training part, the held-out part (maybe empty) and the classes' names, none where they are numbers; from the
    cache where it has them. Raises DataError for data without a single document."""

    def fill(folder: Path) -> None:
        if split.chosen.all():
            raise DataError(f"data: {split.corpus.name} holds no text")
        ids: list[int] = []
        names: list[str] = []
        if LABEL in split.wanted:
            place = list(split.wanted).index(LABEL)
            ids, names = class_ids([row[place] for _, row in split.rows()], split.wanted[LABEL])
        (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")
        parts = _encode(folder, split, tokenizer, progress)
        for part, name in enumerate(PARTS):
            if LABEL in split.wanted:
                np.save(folder / name / f"{LABEL}.npy", np.array(ids, dtype=np.int64)[parts == part])

    key = digest(["tokens 3", split.key, tokenizer.fingerprint])
    return cached(cache_dir / "tokens" / key, fill, lambda folder: _read(folder, split.wanted))


def streams_of(wanted: Wanted) -> list[str]:
    """The names of the streams that documents with these fields become."""
    if MESSAGES in wanted or PROMPT in wanted:
        return [TEXT, LOSS_MASK]
    if PAIR in wanted:
        return [TEXT, SIDES]
    return [key for key in wanted if key in TEXTS]


def _read(folder: Path, wanted: Wanted) -> tuple[Part, Part, tuple[str, ...]]:
    names = json.loads((folder / "names.json").read_text(encoding="utf-8"))
    if not isinstance(names, list):
        raise ValueError("names.json should hold a list")
    parts = []
    for part in (folder / name for name in PARTS):
        streams = {key: TokenStream(part / key) for key in streams_of(wanted)}
        if any(len(stream.tokens) != stream.starts[-1] for stream in streams.values()):  # which opens every file
            raise ValueError(f"{part} holds another number of tokens than it states")
        parts.append(Part(streams, np.load(part / f"{LABEL}.npy") if LABEL in wanted else None))
    train, evaluation = parts
    return train, evaluation, tuple(names)


def class_ids(labels: list[Any], field: str) -> tuple[list[int], list[str]]:
    """Labels as ids, and the names that the ids stand for: whole numbers are ids already and name nothing, texts are
    sorted. Raises DataError for other labels."""
    numbers = [isinstance(v, int) or (isinstance(v, str) and v.strip().isdecimal() and len(v) < 100) for v in labels]
    if all(numbers):
        ids = [int(v) for v in labels]
        for row, number in enumerate(ids, 1):
            if not 0 <= number < 2**63:
                raise DataError(f"{LABEL}: field {field!r} of row {row} is {shown(number)}; classes are numbered from "
                                "0 on, so write numbers below num_labels")
        return ids, []
    texts = [isinstance(label, str) and bool(label.strip()) for label in labels]
    fitting = numbers if sum(numbers) > sum(texts) else texts  # what most rows hold is what was meant
    for number, (label, fits) in enumerate(zip(labels, fitting, strict=True), 1):
        if not fits:
            fraction = isinstance(label, float) and label % 1 > 0
            instead = ", for no task here regresses on numbers; or data.label=<the field of a class>" * fraction
            raise DataError(f"{LABEL}: field {field!r} of row {number} is {shown(label)}; write a text, or a whole "
                            f"number in every row{instead}")
    names = sorted(set(labels))
    places = {name: place for place, name in enumerate(names)}
    return [places[label] for label in labels], names


def classes_by_number(names: tuple[str, ...], facts: ModelFacts, num_labels: int | None) -> tuple[str, ...]:
    """The names of classes by number: the model's `label_names` where each of the data's `names` is one of them, else
    the data's own order, as transformers' examples have it.

    num_labels: the recipe's. Raises DataError where the model knows some of the names alone, unless that is written.
    """
    strange = [name for name in names if name not in facts.label_names]
    if names and not strange:
        return facts.label_names
    if len(strange) < len(names) and num_labels is None:
        raise DataError(f"{LABEL}: {strange[0]!r} is none of the model's classes ({', '.join(facts.label_names)}), and "
                        f"others are; rename it, or write num_labels={max(len(names), 2)} to number classes anew")
    return names


def _encode(folder: Path, split: Split, tokenizer: Tokenizer, progress: Progress | None) -> Array:
    """Write the rows' streams into a folder for each part; the rows' parts, int64 (rows,)."""
    streams, wanted = streams_of(split.wanted), list(split.wanted)
    sizes = {LOSS_MASK: 2, SIDES: SIDES_SIZE}
    writers = {key: [StreamWriter(folder / part / key, sizes.get(key, tokenizer.vocab_size)) for part in PARTS]
               for key in streams}
    parts: list[int] = []
    total = len(split.chosen)
    for batch in _batches(split.rows()):
        here, rows = [part for part, _ in batch], [row for _, row in batch]
        if LOSS_MASK in streams:
            from tightfit.data.chat import encode  # for what is learned in part, alone

            origins = [split.origin(len(parts) + number) for number in range(1, len(rows) + 1)]
            encoded = encode(split.wanted, rows, tokenizer, origins)
        elif SIDES in streams:
            ids, sides = zip(*tokenizer.encode_pairs([(row[0], row[1]) for row in rows]), strict=True)
            encoded = {TEXT: [*ids], SIDES: [*sides]}
        else:
            # What a model reads to answer is as the tokenizer makes it: so it is read when the model is used.
            encoded = {key: tokenizer.encode_batch([row[wanted.index(key)] for row in rows], target=key == TARGET,
                                                   ended=key == TARGET or len(wanted) == 1) for key in streams}
        for key in streams:
            for part, writer in enumerate(writers[key]):
                writer.extend([ids for place, ids in zip(here, encoded[key], strict=True) if place == part])
        if progress is not None and len(parts) < total:
            progress("tokenizing", min(len(parts) + len(batch), total), total)
        parts += here
    for writer in chain.from_iterable(writers.values()):
        writer.close()
    return np.array(parts, dtype=np.int64)


def _batches(rows: Iterable[tuple[int, Row]]) -> Iterator[list[tuple[int, Row]]]:
    """Rows in groups of about `BATCH_CHARACTERS`."""
    waiting: list[tuple[int, Row]] = []
    size = 0
    for item in rows:
        waiting.append(item)
        size += sum(len(str(value)) for value in item[1])
        if size >= BATCH_CHARACTERS:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def unlearned(loss_mask: TokenStream | None, limit: int | None) -> int:
    """The number of documents without a token that is learned; 0 where all tokens are. limit: positions of a
    document that are seen."""
    if loss_mask is None:
        return 0
    before = np.concatenate(([0], np.cumsum(loss_mask.tokens, dtype=np.int64)))
    starts, ends = loss_mask.starts[:-1], loss_mask.starts[1:]
    stops = ends if limit is None else np.minimum(ends, starts + limit + 1)  # the last is predicted and not shown
    return int((before[stops] == before[np.minimum(starts + 1, stops)]).sum())


def something_to_learn(task: Task, part: Part, tokenizer: Tokenizer) -> bool:
    """Whether the training documents have a token to predict, or, where they have classes, any text at all."""
    train = part.streams[TEXT]
    if LOSS_MASK in part.streams:
        return bool(part.streams[LOSS_MASK].counts[1])
    if task.predicts == "next":  # a document's first token has none before it to be predicted from
        return len(train) > train.documents
    if task.predicts in ("hidden", "class"):
        return bool(np.delete(train.counts, list(tokenizer.special_ids)).any())
    return True


def unigram_loss(task: Task, train: Part, held_out: Part, special_ids: tuple[int, ...] = ()) -> float | None:
    """Nats per held-out token, predicted by how often each token occurs in training (add-one smoothed); None where no
    tokens are predicted, or not all. special_ids: tokens that are never hidden."""
    if task.predicts == "class" or LOSS_MASK in train.streams:
        return None
    text = TARGET if task.predicts == "target" else TEXT
    stream, counts = held_out.streams[text], train.streams[text].counts + 1
    seen = stream.counts.astype(np.float64)
    if task.predicts == "next":  # a document's first token is never predicted
        seen -= np.bincount(stream.tokens[stream.starts[:-1]], minlength=len(seen))
    if task.predicts == "hidden":
        seen, counts = (np.delete(numbers, special_ids) for numbers in (seen, counts))
    return float((seen * -np.log(counts / counts.sum())).sum() / max(seen.sum(), 1.0))

"""Samples that are rows of the caller's own, already tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import numpy as np

from tightfit.data.readers import MissingField
from tightfit.data.samples import PADDED_WITH_ZERO, Example, next_tokens, shifted_right
from tightfit.errors import DataError, cut, one_line
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, Array, Task, get_task

IGNORED_FIELDS = frozenset({
    "position_ids", "decoder_input_ids", "decoder_attention_mask", "global_attention_mask", "inputs_embeds", "bbox",
    "seq_lengths", "seq_idx", "completion_mask", "assistant_masks", "loss_mask", "weight",
})  # fmt: skip
"""Fields of rows that other trainers read: inputs of models, documents that share a row, and what is learned."""
ALSO_LABELS = ("label", "label_ids")
"""Names under which Hugging Face's collators take the labels too."""
COUNTED_ROWS = 10_000
"""So many rows, evenly spread, are looked at to count those that are cut, and for the largest value."""


class Rows(Sized, Protocol):
    """Any map-style data set: a list of dicts, a `datasets.Dataset`."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """The row `index`."""


@dataclass(frozen=True, kw_only=True)
class RowExamples:
    """Rows as examples of a task. name: the argument that they are given as.

    Rows hold `input_ids` (or `pixel_values`), and may hold `attention_mask` (positions that it hides are dropped),
    `token_type_ids` and `labels`: a class, or one label for each token in the Hugging Face convention (not shifted,
    -100 where nothing counts). A causal-lm without labels predicts its own tokens.
    """

    rows: Rows
    task: Task
    seq_len: int
    facts: ModelFacts
    name: str

    @classmethod
    def of(cls, rows: Rows, recipe: Recipe, facts: ModelFacts, name: str = "dataset") -> RowExamples:
        """The rows as examples of the recipe's task. Raises DataError for what has no rows by number, or whose first
        does not serve: MissingField where that lacks a field."""
        kind = type(rows).__name__
        if not isinstance(rows, Sized):
            raise DataError(f"{name}: {kind} has no length, as streamed data has none, and an epoch of it no number "
                            "of steps; give rows with len() and [i], such as load_dataset(..., streaming=False)")
        if isinstance(rows, Mapping) and rows and all(hasattr(part, "column_names") for part in rows.values()):
            parts = " or ".join(f"[{part!r}]" for part in rows)
            raise DataError(f"{name}: a {kind} holds several data sets; give one of them, by {parts}")
        if isinstance(rows, Mapping):
            raise DataError(f"{name}: a mapping of columns has no rows; give datasets.Dataset.from_dict(...) of it")
        if hasattr(rows, "iloc"):
            raise DataError(f"{name}: a {kind} gives columns and no rows; give datasets.Dataset.from_pandas(...) of it")
        if not hasattr(rows, "__getitem__"):
            raise DataError(f"{name}: {kind} does not give a row by its number; give rows with len() and [i], such as "
                            "a DataLoader's own .dataset: they are batched and padded here")
        if not len(rows):
            raise DataError(f"{name}: it has no rows; give one at least")
        found = cls(rows=rows, task=get_task(recipe.task), seq_len=recipe.seq_len, facts=facts, name=name)
        found.example(0, 0)
        found._require_unshifted()
        return found

    def longest(self) -> int:
        """The tokens of the longest row, or of the longest target."""
        return max(self.tokens(index) for index in range(len(self)))

    def cut_note(self) -> str | None:
        """A sentence that says how many rows are cut to `seq_len`; None where none is."""
        if self.task.reads == "images":
            return None
        tokens = np.array([self.tokens(index) for index in self._looked_at()])
        cut_rows = int((tokens > self.seq_len + (self.task.predicts == "next")).sum())  # the last token is a label
        if not cut_rows:
            return None
        longest = int(min(tokens.max(), self.facts.max_positions or tokens.max()))
        advice = f"; write seq_len={longest} for more of them" if longest > self.seq_len else ""
        sampled = " looked at" * (len(self) > COUNTED_ROWS)
        return (f"{self.name}: {cut_rows:,} of {len(tokens):,} rows{sampled} are longer "
                f"than seq_len={self.seq_len} and cut there{advice}")

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int, epoch: int) -> Example:
        row = self._row(index)
        if self.task.reads == "images":
            return Example({"pixel_values": np.asarray(row["pixel_values"], np.float32)}, self._class(row, index))
        ids = self._ids(row, "input_ids", index)
        shown = self._shown(row, len(ids), index)
        ids = ids[shown][: self.seq_len + 1]
        inputs = {"input_ids": ids[: self.seq_len]}
        for name in PADDED_WITH_ZERO & row.keys():
            if row[name] is not None:
                inputs[name] = self._ids(row, name, index)[shown][: self.seq_len]
        if self.task.predicts == "class":
            return Example(inputs, self._class(row, index))
        if self.task.predicts == "target":
            decoder = shifted_right(self._target(row, index), self.seq_len, self.facts)
            return Example({**inputs, **decoder.inputs}, decoder.labels)
        labels = ids
        if row.get("labels") is not None:
            labels = self._ids(row, "labels", index)
            if len(labels) != len(shown):
                raise self._wrong(index, f"has {len(labels)} labels for {len(shown)} input_ids; write one for each, "
                                  "remove them, or write task=sequence-classification for one class a row")
            labels = labels[shown][: self.seq_len + 1]
        if self.task.predicts == "next":
            return Example(inputs, next_tokens(labels, self.seq_len).labels)
        return Example(inputs, labels[: self.seq_len])

    def _require_unshifted(self) -> None:
        """Raise DataError where the first row's labels are the tokens behind their places already."""
        row = self._row(0)
        if self.task.predicts != "next" or row.get("labels") is None:
            return
        ids, labels = (self._ids(row, name, 0) for name in ("input_ids", "labels"))
        counts = labels[:-1] != IGNORE
        here, behind, found = ids[:-1][counts], ids[1:][counts], labels[:-1][counts]
        if np.array_equal(found, behind) and not np.array_equal(found, here):
            raise self._wrong(0, "has the next tokens as its labels, and labels are shifted here: each place would "
                              f"learn the token after the next; write each place's own token, {IGNORE} where nothing "
                              "is learned, or remove labels to learn every token")

    def tokens(self, index: int) -> int:
        """The tokens of a row that are not hidden, or of its target where those are more."""
        row = self._row(index)
        target = len(self._target(row, index)) if self.task.predicts == "target" else 0
        return max(int(self._shown(row, len(self._ids(row, "input_ids", index)), index).sum()), target)

    def _row(self, index: int) -> Mapping[str, Any]:
        """A row that has what the task needs, with its labels called so."""
        try:
            row = self.rows[index]
        except Exception as error:  # of the caller's own code
            raise self._wrong(index, f"cannot be read: {type(error).__name__}: {one_line(error)}") from error
        if not isinstance(row, Mapping):
            raise self._wrong(index, f"is of type {type(row).__name__}; give mappings such as "
                              '{"input_ids": [...]}')
        if ignored := sorted(name for name in IGNORED_FIELDS & row.keys() if row[name] is not None):
            raise self._wrong(index, f"holds {', '.join(ignored)}, which is not read here; remove it, with a document "
                              "in each row and what is not learned as -100 in labels")
        also = [name for name in ALSO_LABELS if row.get(name) is not None]
        if also and row.get("labels") is None:
            row = {**row, "labels": row[also[0]]}
        for name in self.task.needs:
            if row.get(name) is None:
                advice = "; tokenize it, or write data.text=<its field of text>" if name == "input_ids" else ""
                raise MissingField(f"{self.name}: row {index} has no {name!r}, which {self.task.name} needs; it has: "
                                   f"{', '.join(row)}{advice}", row)
        return row

    def _shown(self, row: Mapping[str, Any], tokens: int, index: int) -> Array:
        """Whether its `attention_mask` shows each of a row's tokens: bool (tokens,)."""
        mask = row.get("attention_mask")
        shown = np.ones(tokens, bool) if mask is None else np.asarray(mask, bool).reshape(-1)
        if len(shown) != tokens:
            raise self._wrong(index, f"has an attention_mask of {len(shown)} for {tokens} input_ids")
        return shown

    def _ids(self, row: Mapping[str, Any], name: str, index: int) -> Array:
        ids = self._integers(row, name, index).reshape(-1)
        self._check(ids, name, index, self.facts.vocab_size, "vocab_size")
        return ids

    def _target(self, row: Mapping[str, Any], index: int) -> Array:
        if np.ndim(row["labels"]) == 0:  # such as the class of a row
            raise self._wrong(index, f"has {cut(repr(row['labels']), 80)} as its labels, and {self.task.name} learns "
                              "the tokens of a target; write a list of them")
        return self._ids(row, "labels", index)

    def _class(self, row: Mapping[str, Any], index: int) -> Array:
        label = self._integers(row, "labels", index)
        if label.size != 1:
            raise self._wrong(index, f"has {cut(repr(row['labels']), 80)} as its labels, and {self.task.name} learns "
                              "one class a row; write the number of one")
        label = label.reshape(())
        self._check(label, "labels", index, self.facts.num_labels, "num_labels")
        return label

    def _check(self, values: Array, name: str, index: int, high: int, field: str) -> None:
        counts = values != IGNORE if name == "labels" else True
        wrong = values[counts & ((values < 0) | (values >= high))]
        if wrong.size:
            sampled = " or more," * (len(self) > COUNTED_ROWS)
            most = max([int(wrong.max()), *self._values(field)])
            more = f"write {field}={most + 1}{sampled} or " if wrong.min() >= 0 else ""
            raise self._wrong(index, f"has {int(wrong[0])} among its {name}, which should lie in 0 to {high - 1}; "
                              f"{more}change the data")

    def _values(self, field: str) -> Iterator[int]:
        """The largest values, in rows that are looked at, of what a field of the recipe bounds."""
        names = ("input_ids", "labels") if field == "vocab_size" else ("labels",)
        for index, name in product(self._looked_at(), names):
            with suppress(DataError):  # of other rows, said when they are read
                row = self._row(index)
                if row.get(name) is not None:
                    yield int(self._integers(row, name, index).max(initial=0))

    def _looked_at(self) -> list[int]:
        """The numbers of `COUNTED_ROWS` rows, evenly spread, or of all where they are fewer."""
        looked_at = min(len(self), COUNTED_ROWS)
        return [place * len(self) // looked_at for place in range(looked_at)]

    def _integers(self, row: Mapping[str, Any], name: str, index: int) -> Array:
        """A row's values of that name. Raises DataError for fractions, texts and nested rows."""
        with suppress(OverflowError, RuntimeError, TypeError, ValueError), np.errstate(invalid="ignore"):  # of NaN
            given = np.asarray(row[name])
            found = given.astype(np.int64)
            if given.dtype.kind not in "SU" and np.array_equal(found, given) and given.squeeze().ndim <= 1:
                return found
        raise self._wrong(index, f"has {cut(repr(row[name]), 80)} as its {name}, which should be integers, as a "
                          "tokenizer gives them for one row")

    def _wrong(self, index: int, what: str) -> DataError:
        return DataError(f"{self.name}: row {index} {what}")

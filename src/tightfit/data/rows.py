"""A person's own data set, already tokenized, as samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tightfit.data.samples import PADDED_WITH_ZERO, Example, Padded, next_tokens, padded, shifted_right
from tightfit.errors import DataError
from tightfit.models import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, Array, Task, get_task


class Rows(Protocol):
    """Any map-style data set: a list of dicts, a `datasets.Dataset`."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """The row `index`."""


def samples_from_rows(rows: Rows, recipe: Recipe, facts: ModelFacts) -> Padded:
    """The rows as samples, one a row of the micro-batch.

    Rows hold `input_ids` (or `pixel_values`), and may hold `attention_mask` (positions that it hides are dropped),
    `token_type_ids` and `labels`: a class, or one label for each token in the Hugging Face convention (not shifted,
    -100 where nothing counts). A causal-lm without labels predicts its own tokens. Raises DataError for a row that
    lacks what the task needs.
    """
    examples = RowExamples(rows=rows, task=get_task(recipe.task), seq_len=recipe.seq_len, facts=facts)
    if len(examples):
        examples.example(0, 0)
    return padded(examples, recipe, facts)


@dataclass(frozen=True, kw_only=True)
class RowExamples:
    """Rows as examples of a task."""

    rows: Rows
    task: Task
    seq_len: int
    facts: ModelFacts

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int, epoch: int) -> Example:
        row = self.rows[index]
        for name in self.task.needs:
            if row.get(name) is None:
                held = ", ".join(k for k in row)
                raise DataError(f"dataset: row {index} has no {name!r}, which {self.task.name} needs; it has: {held}")
        if self.task.reads == "images":
            return Example({"pixel_values": np.asarray(row["pixel_values"], np.float32)}, self._class(row, index))
        mask = row.get("attention_mask")
        shown = slice(None) if mask is None else np.asarray(mask, dtype=bool)
        ids = self._ids(row, "input_ids", index)[shown][: self.seq_len + 1]
        inputs = {"input_ids": ids[: self.seq_len]}
        for name in PADDED_WITH_ZERO & row.keys():
            inputs[name] = self._ids(row, name, index)[shown][: self.seq_len]
        if self.task.predicts == "class":
            return Example(inputs, self._class(row, index))
        if self.task.predicts == "target":
            target = self._ids(row, "labels", index)[: self.seq_len]
            start, pad = self.facts.decoder_start_token_id, self.facts.pad_token_id
            return Example({**inputs, "decoder_input_ids": shifted_right(target, start, pad)}, target)
        labels = ids
        if row.get("labels") is not None:
            labels = self._ids(row, "labels", index)
            if len(labels) != len(row["input_ids"]):
                raise DataError(f"dataset: row {index} has {len(labels)} labels for {len(row['input_ids'])} input_ids")
            labels = labels[shown][: self.seq_len + 1]
        if self.task.predicts == "next":
            return Example(inputs, next_tokens(labels, self.seq_len).labels)
        return Example(inputs, labels[: self.seq_len])

    def _ids(self, row: Mapping[str, Any], name: str, index: int) -> Array:
        ids = np.asarray(row[name], dtype=np.int64).reshape(-1)
        self._check(ids, name, index, self.facts.vocab_size, "vocab_size")
        return ids

    def _class(self, row: Mapping[str, Any], index: int) -> Array:
        label = np.asarray(row["labels"], dtype=np.int64).reshape(())
        self._check(label, "labels", index, self.facts.num_labels, "num_labels")
        return label

    def _check(self, values: Array, name: str, index: int, high: int, field: str) -> None:
        if values.size == 0 or (values.min() >= 0 and values.max() < high):
            return
        real = values[values != IGNORE]
        if real.size and (real.min() < 0 or real.max() >= high):
            worst = real.min() if real.min() < 0 else real.max()
            raise DataError(f"dataset: row {index} has {worst} among its {name}, which should lie in 0 to {high - 1}; "
                            f"write {field}={max(int(worst), 0) + 1} or change the data")  # fmt: skip

"""The training and the held-out part of a corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tightfit.data.corpora import Corpus
from tightfit.data.readers import TEXTS, Row, Wanted
from tightfit.files import digest
from tightfit.tasks import Array

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many documents of how many are finished."""


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
        return digest(["split 2", self.corpus.fingerprint, repr(self.fraction), *fields])

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


def held_out(documents: int, fraction: float) -> Array:
    """Bool (documents,): True where a document is held out.

    The share is exact up to rounding, with at least one document on each side where there are two or more, and the
    choice depends on nothing but the number of documents.
    """
    chosen = np.zeros(documents, dtype=bool)
    if fraction == 0.0 or documents < 2:
        return chosen
    wanted = min(max(round(documents * fraction), 1), documents - 1)
    chosen[np.random.default_rng(0).permutation(documents)[:wanted]] = True
    return chosen


def split_text(text: str, fraction: float) -> tuple[str, str]:
    """A single document's beginning, to train on, and its end, to hold out; cut behind a line if it can be.

    The two together are the text; the end has at least one character where the text has two.
    """
    cut = min(max(round(len(text) * (1.0 - fraction)), 1), len(text) - 1)
    cut = text.rfind("\n", cut - cut // 10, cut) + 1 or cut
    return text[:cut], text[cut:]

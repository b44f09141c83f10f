"""The training and the held-out part of a corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import compress

import numpy as np

from tightfit.data.corpora import Corpus
from tightfit.data.readers import MESSAGES, TEXT, TEXTS, Row, Wanted
from tightfit.files import digest
from tightfit.tasks import Array

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many documents of how many are finished."""


@dataclass(frozen=True)
class Split:
    """A corpus' rows, each in the training or the held-out part.

    fraction: share of them to hold out, where there is no `evaluation`, a corpus that is held out whole. Where rows are
    text alone, empty ones are left out, and a single one is cut in two.
    """

    corpus: Corpus
    wanted: Wanted
    fraction: float
    evaluation: Corpus | None = None

    @property
    def key(self) -> str:
        """Names the parts' content."""
        fields = (part for pair in self.wanted.items() for part in pair)
        held = repr(self.fraction) if self.evaluation is None else self.evaluation.fingerprint
        return digest(["split 2", self.corpus.fingerprint, held, *fields])

    @cached_property
    def chosen(self) -> Array:
        """Bool (rows,): which rows are held out. Reads the corpus once."""
        rows = sum(1 for _ in self._rows_of(self.corpus))
        if self.evaluation is None:
            return held_out(rows, self.fraction)
        return np.repeat([False, True], [rows, sum(1 for _ in self._rows_of(self.evaluation))])

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Each row with its part's place in `PARTS`."""
        if len(self.chosen) == 1 and self._text_alone and self.fraction:
            ((text,),) = self._rows_of(self.corpus, self.evaluation)
            yield from enumerate((part,) for part in split_text(text, self.fraction) if part)
        else:
            yield from zip(self.chosen.astype(int).tolist(), self._rows_of(self.corpus, self.evaluation), strict=True)

    def origin(self, number: int) -> str:
        """A row by its number in all of them, from 1, as a person finds it."""
        before = len(self.chosen) - int(self.chosen.sum())
        if self.evaluation is None or number <= before:
            return f"{self.corpus.name} row {number}"
        return f"{self.evaluation.name} row {number - before}"

    def training_texts(self, progress: Progress | None = None) -> Iterator[str]:
        """Every text of the training part."""
        texts: Callable[[Row], Iterable[str]] = partial(compress, selectors=[key in TEXTS for key in self.wanted])
        if MESSAGES in self.wanted:
            from tightfit.data.conversations import texts_of  # for conversations alone

            texts = partial(texts_of, self.wanted)
        for number, (part, row) in enumerate(self.rows(), 1):
            if part == 0:
                yield from texts(row)
            if progress is not None and number <= len(self.chosen):  # not more, where one document is cut in two
                progress("training the tokenizer", number, len(self.chosen))

    @property
    def _text_alone(self) -> bool:
        return list(self.wanted) == [TEXT]

    def _rows_of(self, *corpora: Corpus | None) -> Iterator[Row]:
        return (row for corpus in corpora if corpus is not None for row in corpus.rows()
                if not self._text_alone or row[0].strip())


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

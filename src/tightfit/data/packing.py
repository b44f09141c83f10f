"""Packed samples: every row is filled with documents, which do not see each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tightfit.data.masking import Masking
from tightfit.data.stream import TokenStream
from tightfit.tasks import IGNORE, Array, MicroBatch


@dataclass(frozen=True)
class Packed:
    """Consecutive rows of `seq_len` tokens of a stream; all rows together hold each of its tokens once.

    The last row begins early enough to be full, and does not count again what the row before it has counted. A stream
    shorter than `seq_len` is one shorter row. With `masking`, labels are the hidden tokens; without, the next ones.
    """

    stream: TokenStream
    seq_len: int
    masking: Masking | None = None

    def __len__(self) -> int:
        return (len(self.stream) + self.seq_len - 1) // self.seq_len

    def numbers(self, indices: Array) -> Array:
        return indices

    def batch(self, indices: Array, epoch: int) -> tuple[MicroBatch, int]:
        """The micro-batch of those rows, and its number of real tokens."""
        length = min(self.seq_len, len(self.stream))
        shape = (len(indices), length)
        ids, labels, positions = (np.empty(shape, dtype=np.int64) for _ in range(3))
        documents = np.empty(shape, dtype=np.int32)
        for row, index in enumerate(indices):
            start = min(int(index) * self.seq_len, len(self.stream) - length)
            counted = int(index) * self.seq_len - start
            documents[row], positions[row], ends = self._layout(start, length)
            if self.masking is None:
                ids[row] = self.stream.tokens[start : start + length]
                labels[row, :-1] = ids[row, 1:]
                labels[row, -1] = IGNORE if start + length == len(self.stream) else self.stream.tokens[start + length]
                labels[row, ends] = IGNORE
                labels[row, :counted] = IGNORE
            else:
                real = self.stream.tokens[start : start + length].astype(np.int64)
                ids[row], labels[row] = self.masking.apply(real, epoch, int(index), counted)
        inputs = {"input_ids": ids, "position_ids": positions}
        return MicroBatch(inputs=inputs, labels=labels, mask="packed", document_ids=documents), int(ids.size)

    def _layout(self, start: int, length: int) -> tuple[Array, Array, Array]:
        """A row's document ids (int32), positions (int64), and where in it documents have their last token."""
        starts = self.stream.starts
        low, high = np.searchsorted(starts, (start, start + length), side="right")
        begins = starts[low:high] - start  # of documents that begin inside the row, or right behind it
        inside = begins[begins < length]
        documents = np.zeros(length, dtype=np.int32)
        documents[inside] = 1
        documents = np.cumsum(documents, dtype=np.int32)
        positions = np.arange(length) - np.concatenate(([0], inside))[documents]
        return documents, positions, begins - 1

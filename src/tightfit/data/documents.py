"""One tokenized document a sample, for every task that reads text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tightfit.data.masking import Masking
from tightfit.data.samples import Example, next_tokens, shifted_right
from tightfit.data.stream import TokenStream
from tightfit.tasks import Array


def truncated(ids: Array, length: int) -> Array:
    """At most `length` tokens, the last of which stays the document's last."""
    return ids if len(ids) <= length else np.concatenate((ids[: length - 1], ids[-1:]))


@dataclass(frozen=True)
class CausalDocuments:
    """Documents cut to `seq_len` tokens, to predict each token's successor."""

    stream: TokenStream
    seq_len: int

    def __len__(self) -> int:
        return self.stream.documents

    def example(self, index: int, epoch: int) -> Example:
        return next_tokens(self.stream.document(index, self.seq_len + 1), self.seq_len)


@dataclass(frozen=True)
class MaskedDocuments:
    """Documents cut to `seq_len` tokens, some of them hidden anew in each epoch."""

    stream: TokenStream
    seq_len: int
    masking: Masking

    def __len__(self) -> int:
        return self.stream.documents

    def example(self, index: int, epoch: int) -> Example:
        ids = truncated(self.stream.document(index), self.seq_len)
        shown, labels = self.masking.apply(ids, epoch, index)
        return Example({"input_ids": shown}, labels)


@dataclass(frozen=True)
class ClassifiedDocuments:
    """Documents cut to `seq_len` tokens and their classes, int64 (documents,)."""

    stream: TokenStream
    classes: Array
    seq_len: int

    def __len__(self) -> int:
        return self.stream.documents

    def example(self, index: int, epoch: int) -> Example:
        return Example({"input_ids": truncated(self.stream.document(index), self.seq_len)}, self.classes[index])


@dataclass(frozen=True, kw_only=True)
class TranslatedDocuments:
    """Source documents and their targets, each cut to `seq_len` tokens."""

    sources: TokenStream
    targets: TokenStream
    seq_len: int
    start_id: int
    pad_id: int

    def __len__(self) -> int:
        return self.sources.documents

    def example(self, index: int, epoch: int) -> Example:
        labels = self.targets.document(index, self.seq_len)
        inputs = {
            "input_ids": truncated(self.sources.document(index), self.seq_len),
            "decoder_input_ids": shifted_right(labels, self.start_id, self.pad_id),
        }
        return Example(inputs, labels)

"""One tokenized document a sample, for every task that reads text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tightfit.data.masking import Masking
from tightfit.data.readers import TARGET, TEXT
from tightfit.data.samples import Example, next_tokens, shifted_right
from tightfit.data.tokenized import Part
from tightfit.models import ModelFacts
from tightfit.tasks import Array


def truncated(ids: Array, length: int) -> Array:
    """At most `length` tokens, the last of which stays the document's last."""
    return ids if len(ids) <= length else np.concatenate((ids[: length - 1], ids[-1:]))


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of a part, cut to `seq_len` tokens, as examples of the task that they were read for.

    They predict their targets, their classes, the tokens that `masking` hides, or else each token's successor.
    """

    part: Part
    seq_len: int
    facts: ModelFacts
    masking: Masking | None = None

    def __len__(self) -> int:
        return self.part.streams[TEXT].documents

    def example(self, index: int, epoch: int) -> Example:
        stream, length = self.part.streams[TEXT], self.seq_len
        if self.masking is not None:
            shown, labels = self.masking.apply(truncated(stream.document(index), length), epoch, index)
            return Example({"input_ids": shown}, labels)
        if self.part.classes is not None:
            return Example({"input_ids": truncated(stream.document(index), length)}, self.part.classes[index])
        if TARGET in self.part.streams:
            target = self.part.streams[TARGET].document(index, length)
            decoder = shifted_right(target, self.facts.decoder_start_token_id, self.facts.pad_token_id)
            ids = truncated(stream.document(index), length)
            return Example({"input_ids": ids, "decoder_input_ids": decoder}, target)
        return next_tokens(stream.document(index, length + 1), length)

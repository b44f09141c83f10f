"""Samples, which a loader draws micro-batches from by index: documents packed into rows, or one to a row, padded."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import numpy as np

from tightfit.data.readers import LOSS_MASK, SIDES, TARGET, TEXT
from tightfit.data.tokenized import Part, TokenStream
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, Array, MaskKind, MicroBatch, get_task

PADDED_WITH_ZERO = frozenset({"token_type_ids"})
"""Inputs whose padding is 0; other inputs of ids are padded with the model's padding token."""


class Samples(Sized, Protocol):
    """A fixed number of samples. It must survive pickling to a worker process, cheaply."""

    def batch(self, indices: Array, epoch: int) -> MicroBatch:
        """The micro-batch of the samples `indices` (int64, 1-d) as seen in `epoch`. A pure function of its arguments.
        """

    def numbers(self, indices: Array) -> Array:
        """The numbers that the samples `indices` have in the data, for messages: int64 (indices,)."""


@dataclass(frozen=True)
class Example:
    """One sample: inputs without a batch dimension, and labels, a class (0-d) or one for each position (1-d)."""

    inputs: dict[str, Array]
    labels: Array


class Examples(Sized, Protocol):
    """Samples that are made one at a time."""

    def example(self, index: int, epoch: int) -> Example:
        """The sample `index` as seen in `epoch`. A pure function of its arguments."""


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Samples of one example a row, padded on the right to the longest of the micro-batch.

    pad_id: the model's padding token. multiple: rows are rounded up to a multiple of this. causal: nothing looks back
    at padding, so the micro-batch needs no mask. chosen: which of the examples these are, int64 (samples,); None for
    all of them.
    """

    examples: Examples
    pad_id: int
    multiple: int = 1
    causal: bool = False
    chosen: Array | None = None

    def __len__(self) -> int:
        return len(self.examples) if self.chosen is None else len(self.chosen)

    def numbers(self, indices: Array) -> Array:
        return indices if self.chosen is None else self.chosen[indices]

    def batch(self, indices: Array, epoch: int) -> MicroBatch:
        rows = [self.examples.example(int(i), epoch) for i in self.numbers(indices)]
        nothing = np.empty(0, dtype=np.int64)
        if "input_ids" not in rows[0].inputs:
            stacked = {name: np.stack([r.inputs[name] for r in rows]) for name in rows[0].inputs}
            return MicroBatch(inputs=stacked, labels=np.stack([r.labels for r in rows]))
        inputs = {  # what a row leaves out is 0, as a model takes it that is given none
            name: self._pad([r.inputs.get(name, nothing) for r in rows],
                            0 if name in PADDED_WITH_ZERO else self.pad_id)
            for name in dict.fromkeys(name for r in rows for name in r.inputs)
        }
        one_each = rows[0].labels.ndim == 0
        labels = np.stack([r.labels for r in rows]) if one_each else self._pad([r.labels for r in rows], IGNORE)
        lengths = np.array([len(r.inputs["input_ids"]) for r in rows])
        padding = np.arange(inputs["input_ids"].shape[1]) < lengths[:, None]
        if padding.all():
            return MicroBatch(inputs=inputs, labels=labels)
        mask: MaskKind = "none" if self.causal else "padded"
        return MicroBatch(inputs=inputs, labels=labels, mask=mask, padding=padding)

    def _pad(self, rows: Sequence[Array], value: int) -> Array:
        longest = max(1, *(len(row) for row in rows))  # models take no rows of nothing
        result = np.full((len(rows), -(-longest // self.multiple) * self.multiple), value, dtype=np.int64)
        for place, row in zip(result, rows, strict=True):
            place[: len(row)] = row
        return result


def padded(examples: Examples, recipe: Recipe, facts: ModelFacts) -> Padded:
    """Examples of the recipe's task as samples, padded as its model and the recipe want it."""
    causal = get_task(recipe.task).predicts == "next"
    return Padded(examples=examples, pad_id=facts.pad_token_id, multiple=recipe.pad_sequence_to or 1, causal=causal)


def next_tokens(ids: Array, length: int) -> Example:
    """The causal-lm example of a document: its first `length` tokens, each labelled with the one behind it."""
    labels = np.full(min(len(ids), length), IGNORE, dtype=np.int64)
    following = ids[1 : length + 1]
    labels[: len(following)] = following
    return Example({"input_ids": ids[:length]}, labels)


def shifted_right(target: Array, length: int, facts: ModelFacts) -> Example:
    """The first `length` tokens of a target, and as inputs the decoder's: its first token, then those but the last."""
    start = facts.decoder_start_token_id
    if start is None:
        start = int(np.append(facts.pad_token_id, target[target != IGNORE])[-1])
    shifted = np.concatenate((np.array([start], dtype=np.int64), target[:length][:-1]))
    return Example({"decoder_input_ids": np.where(shifted == IGNORE, facts.pad_token_id, shifted)}, target[:length])


def truncated(ids: Array, length: int, special_ids: tuple[int, ...]) -> Array:
    """At most `length` tokens, those at the document's end that are special kept, as tokenizers cut it."""
    if len(ids) <= length:
        return ids
    kept = sum(1 for _ in takewhile(lambda token: token in special_ids, ids[: -length - 1 : -1]))
    return np.concatenate((ids[: length - kept], ids[len(ids) - kept :]))


def pair_inputs(ids: Array, sides: Array, length: int) -> dict[str, Array]:
    """A model's inputs of a pair of texts in at most `length` tokens: the longer text is cut, then both are, and
    special tokens stay. sides: of `Tokenizer.pairs`."""
    side, types = np.divmod(sides, 4)
    of_text = [side == 1, side == 2]
    first, second = (int(part.sum()) for part in of_text)
    room = max(min(length - len(ids), 0) + first + second, 0)
    shorter = min(first, second, room // 2)
    kept = (shorter, room - shorter) if first <= second else (room - shorter, shorter)
    shown = side == 0
    for part, most in zip(of_text, kept, strict=True):
        shown |= part & (np.cumsum(part) <= most)
    inputs = {"input_ids": ids[shown][:length]}
    return {**inputs, "token_type_ids": types[shown][:length]} if types.any() else inputs


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of a part, cut to `seq_len` tokens, as examples of the task that they were read for.

    They predict their targets, their classes, the tokens that `masking` hides, or else each token's successor, where
    that is learned. special_ids: tokens that stay at a cut document's end.
    """

    part: Part
    seq_len: int
    facts: ModelFacts
    special_ids: tuple[int, ...]
    masking: Masking | None = None

    def __len__(self) -> int:
        return self.part.streams[TEXT].documents

    def example(self, index: int, epoch: int) -> Example:
        streams, length = self.part.streams, self.seq_len
        if self.masking is None and self.part.classes is None and TARGET not in streams:
            ids = labelled = streams[TEXT].document(index, length + 1)
            if LOSS_MASK in streams:
                labelled = np.where(streams[LOSS_MASK].document(index, length + 1), ids, IGNORE)
            return Example({"input_ids": ids[:length]}, next_tokens(labelled, length).labels)
        if SIDES in streams:
            assert self.part.classes is not None
            inputs = pair_inputs(streams[TEXT].document(index), streams[SIDES].document(index), length)
            return Example(inputs, self.part.classes[index])
        ids = truncated(streams[TEXT].document(index), length, self.special_ids)
        if self.masking is not None:
            shown, labels = self.masking.apply(ids, epoch, index)
            return Example({"input_ids": shown}, labels)
        if self.part.classes is not None:
            return Example({"input_ids": ids}, self.part.classes[index])
        target = truncated(streams[TARGET].document(index), length, self.special_ids)
        decoder = shifted_right(target, length, self.facts)
        return Example({"input_ids": ids, **decoder.inputs}, decoder.labels)


@dataclass(frozen=True)
class Packed:
    """Consecutive rows of `seq_len` tokens of a stream; all rows together hold each of its tokens once.

    The last row begins early enough to be full, and does not count again what the row before it has counted. A stream
    shorter than `seq_len` is one shorter row. With `masking`, labels are the hidden tokens; without, the next ones,
    where `loss_mask` is not 0.
    """

    stream: TokenStream
    seq_len: int
    masking: Masking | None = None
    loss_mask: TokenStream | None = None

    def __len__(self) -> int:
        return (len(self.stream) + self.seq_len - 1) // self.seq_len

    def numbers(self, indices: Array) -> Array:
        return indices

    def batch(self, indices: Array, epoch: int) -> MicroBatch:
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
                if self.loss_mask is not None:
                    following = self.loss_mask.tokens[start + 1 : start + length + 1]
                    labels[row, : len(following)][following == 0] = IGNORE
            else:
                real = self.stream.tokens[start : start + length].astype(np.int64)
                ids[row], labels[row] = self.masking.apply(real, epoch, int(index), counted)
        inputs = {"input_ids": ids, "position_ids": positions}
        return MicroBatch(inputs=inputs, labels=labels, mask="packed", document_ids=documents)

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


CHOSEN_SHARE, MASKED_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1
"""Share of the tokens to predict; of those, the shares shown as the mask and as a random token (the rest is shown)."""


def generator(*key: int) -> np.random.Generator:
    """Random numbers that are a pure function of the integers given."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Hides tokens (Devlin et al. 2019, https://arxiv.org/abs/1810.04805, section 3.1)."""

    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...]
    seed: int

    def apply(self, ids: Array, epoch: int, sample: int, first: int = 0) -> tuple[Array, Array]:
        """Model inputs and labels, both int64 (T,), for one sample's `ids`.

        Of the ordinary tokens from position `first` on, 15 % are chosen, rounded and at least one.
        """
        random = generator(self.seed, epoch, sample)
        eligible = np.flatnonzero(~np.isin(ids, self.special_ids))
        eligible = eligible[eligible >= first]
        labels = np.full(len(ids), IGNORE, dtype=np.int64)
        shown = ids.copy()
        if not len(eligible):
            return shown, labels
        chosen = random.choice(eligible, size=max(round(CHOSEN_SHARE * len(eligible)), 1), replace=False, shuffle=False)
        labels[chosen] = ids[chosen]
        fate = random.random(len(chosen))
        replacement = random.integers(0, self.vocab_size, len(chosen))
        shown[chosen] = np.where(
            fate < MASKED_SHARE, self.mask_id, np.where(fate < MASKED_SHARE + RANDOM_SHARE, replacement, ids[chosen])
        )
        return shown, labels

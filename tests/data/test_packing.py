"""Packed rows against a slow second implementation, and each token counted once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tightfit.data.readers import TEXT
from tightfit.data.samples import Masking, Packed
from tightfit.data.tokenized import Part, StreamWriter, TokenStream, unigram_loss
from tightfit.tasks import IGNORE, get_task, global_batch_of


def stream_of(folder: Path, documents: list[list[int]], vocab_size: int = 100) -> TokenStream:
    writer = StreamWriter(folder, vocab_size)
    for document in documents:  # in several pieces, as a corpus is encoded
        writer.extend([np.array(document, dtype=np.int64)])
    writer.close()
    return TokenStream(folder)


def random_documents(seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, random.integers(2, 40), size=random.integers(1, 30))
    return [[*random.integers(1, 100, n - 1).tolist(), 0] for n in lengths]


def slow_rows(documents: list[list[int]], seq_len: int) -> list[list[tuple[int, int, int, int]]]:
    """Rows of (token, label, position, document), one token at a time."""
    flat = [
        (token, document[place + 1] if place + 1 < len(document) else IGNORE, number)
        for number, document in enumerate(documents)
        for place, token in enumerate(document)
    ]
    length = min(seq_len, len(flat))
    rows = []
    for begin in range(0, len(flat), seq_len):
        start = min(begin, len(flat) - length)
        row: list[tuple[int, int, int, int]] = []
        for at in range(start, start + length):
            token, label, number = flat[at]
            new = not row or number != flat[at - 1][2]
            position = 0 if new else row[-1][2] + 1
            document = 0 if not row else row[-1][3] + int(new)
            row.append((token, label if at >= begin else IGNORE, position, document))
        rows.append(row)
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_packing_equals_a_slow_reimplementation(seed: int, tmp_path: Path) -> None:
    documents = random_documents(seed)
    seq_len = int(np.random.default_rng(1000 + seed).integers(1, 25))
    packed = Packed(stream_of(tmp_path / "s", documents), seq_len)
    expected = np.array(slow_rows(documents, seq_len))
    assert len(packed) == len(expected)
    batch = packed.batch(np.arange(len(packed)), epoch=0)
    assert global_batch_of((batch,)).tokens == expected.shape[0] * expected.shape[1]
    assert batch.document_ids is not None
    assert batch.document_ids.dtype == np.int32
    assert batch.labels.dtype == batch.inputs["input_ids"].dtype == batch.inputs["position_ids"].dtype == np.int64
    assert np.array_equal(batch.inputs["input_ids"], expected[..., 0])
    assert np.array_equal(batch.labels, expected[..., 1])
    assert np.array_equal(batch.inputs["position_ids"], expected[..., 2])
    assert np.array_equal(batch.document_ids, expected[..., 3])


@pytest.mark.parametrize("seed", range(10))
def test_every_prediction_counts_once_an_epoch_and_none_crosses(seed: int, tmp_path: Path) -> None:
    documents = random_documents(seed)
    packed = Packed(stream_of(tmp_path / "s", documents), 7)
    batch = packed.batch(np.arange(len(packed)), epoch=0)
    counted = batch.labels != IGNORE
    pairs = Counter(zip(batch.inputs["input_ids"][counted].tolist(), batch.labels[counted].tolist(), strict=True))
    assert pairs == Counter(pair for d in documents for pair in pairwise(d))


def test_masked_rows_choose_from_each_token_once(tmp_path: Path) -> None:
    # 20 tokens in rows of 8: the last row begins at 12, and may hide only what the row before it does not hold.
    stream = stream_of(tmp_path / "s", [[*range(1, 20), 0]])
    masking = Masking(mask_id=99, vocab_size=100, special_ids=(0, 99), seed=3)
    packed = Packed(stream, 8, masking)
    for epoch in range(50):
        batch = packed.batch(np.array([2]), epoch)
        assert (batch.labels[0, :4] == IGNORE).all()
        assert (batch.labels[0, 4:] != IGNORE).sum() == 1
        assert batch.mask == "packed"


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_a_stream_keeps_its_largest_token(vocab_size: int, dtype: type, tmp_path: Path) -> None:
    stream = stream_of(tmp_path / "s", [[vocab_size - 1, 0], [5]], vocab_size)
    assert stream.tokens.dtype == dtype
    assert stream.tokens.tolist() == [vocab_size - 1, 0, 5]
    assert (stream.documents, len(stream)) == (2, 3)
    assert stream.counts[vocab_size - 1] == 1


def test_unigram_loss_by_hand(tmp_path: Path) -> None:
    train = Part({TEXT: stream_of(tmp_path / "t", [[1, 1, 2, 0]], vocab_size=4)}, None)
    held_out = Part({TEXT: stream_of(tmp_path / "h", [[3, 1, 0]], vocab_size=4)}, None)
    probability = {0: 2 / 8, 1: 3 / 8, 2: 2 / 8, 3: 1 / 8}
    expected = -(np.log(probability[1]) + np.log(probability[0])) / 2
    assert unigram_loss(get_task("causal-lm"), train, held_out) == pytest.approx(expected, rel=1e-12)
    expected = -sum(np.log(probability[i]) for i in (3, 1, 0)) / 3
    assert unigram_loss(get_task("masked-lm"), train, held_out) == pytest.approx(expected, rel=1e-12)

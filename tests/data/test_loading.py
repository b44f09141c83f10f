"""The order of the data: every sample once an epoch, ragged ends, exact resuming, workers."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.data.helpers import FACTS, recipe, same, write_texts
from tightfit.data import GlobalBatchLoader, evaluation_global_batches, prepare
from tightfit.data.samples import Example, Padded
from tightfit.errors import DataError
from tightfit.recipe.sections import GIVEN_ROWS
from tightfit.tasks import IGNORE, GlobalBatch

if TYPE_CHECKING:
    from tightfit.recipe import Recipe


@dataclass(frozen=True)
class Numbered:
    """`count` samples; number n is n % 5 + 1 tokens, all of them n."""

    count: int

    def __len__(self) -> int:
        return self.count

    def example(self, index: int, epoch: int) -> Example:
        ids = np.full(index % 5 + 1, index, dtype=np.int64)
        return Example({"input_ids": ids}, np.asarray(epoch))


def numbered(count: int, multiple: int = 1) -> Padded:
    return Padded(examples=Numbered(count), pad_id=999, multiple=multiple)


def shown(global_batches: list[GlobalBatch]) -> list[int]:
    return [int(row[0]) for w in global_batches for m in w.micro_batches for row in m.inputs["input_ids"]]


def test_an_epoch_shows_every_sample_once_and_its_last_global_batch_is_ragged(tmp_path: Path) -> None:
    loader = GlobalBatchLoader(numbered(11), recipe(tmp_path, batch_size=4, micro_batch_size=3))
    assert len(loader) == 3
    global_batches = [loader.global_batch(k) for k in range(6)]
    assert [w.samples for w in global_batches] == [4, 4, 3] * 2
    assert [[m.samples for m in w.micro_batches] for w in global_batches[:3]] == [[3, 1], [3, 1], [3]]
    first, second = shown(global_batches[:3]), shown(global_batches[3:])
    assert sorted(first) == sorted(second) == list(range(11))
    assert first != second
    assert first != list(range(11))
    assert global_batches[4].origin == "epoch 1, samples " + ", ".join(map(str, shown(global_batches[4:5])))
    assert [int(w.micro_batches[0].labels[0]) for w in global_batches] == [0, 0, 0, 1, 1, 1]


def test_what_a_global_batch_shows_is_known_without_making_it(tmp_path: Path) -> None:
    loader = GlobalBatchLoader(numbered(11), recipe(tmp_path, batch_size=4, micro_batch_size=3))
    for index, epoch in ((0, 0), (2, 0), (3, 1), (5, 1)):
        chosen, found = loader.chosen(index)
        assert found == epoch
        assert chosen.tolist() == shown([loader.global_batch(index)])


def test_an_origin_names_samples_as_the_data_numbers_them(tmp_path: Path) -> None:
    settings = recipe(tmp_path, batch_size=10, micro_batch_size=10, data={"source": "dummy", "eval_fraction": 0.5})
    rows = [{"input_ids": [n + 1, 0]} for n in range(40)]
    prepared = prepare(settings, FACTS, dataset=rows)
    assert prepared.evaluation is not None
    global_batch = GlobalBatchLoader(prepared.train, settings).global_batch(1)
    held = next(evaluation_global_batches(prepared.evaluation, settings))
    for made, what in ((global_batch, "epoch 0, samples"), (held, "held-out samples")):
        first = ", ".join(str(n - 1) for n in shown([made])[:8])
        assert made.origin == f"{what} {first}, ... (10 in all)"


def test_the_order_depends_on_the_seed(tmp_path: Path) -> None:
    loaders = [GlobalBatchLoader(numbered(50), recipe(tmp_path, seed=s, batch_size=50)) for s in (0, 0, 1)]
    orders = [shown([loader.global_batch(0)]) for loader in loaders]
    assert orders[0] == orders[1] != orders[2]


def test_padding_and_its_counts(tmp_path: Path) -> None:
    loader = GlobalBatchLoader(numbered(6, multiple=4), recipe(tmp_path, batch_size=6, micro_batch_size=6))
    global_batch = loader.global_batch(0)
    batch = global_batch.micro_batches[0]
    assert batch.inputs["input_ids"].shape == (6, 8)  # the longest has 5 tokens
    assert batch.mask == "padded"
    assert batch.padding is not None
    assert sorted(batch.padding.sum(axis=1).tolist()) == [1, 1, 2, 3, 4, 5]
    assert (batch.inputs["input_ids"][~batch.padding] == 999).all()
    assert global_batch.tokens == 16


def test_nothing_padded_needs_no_mask(tmp_path: Path) -> None:
    loader = GlobalBatchLoader(numbered(6), recipe(tmp_path, batch_size=1, micro_batch_size=1))
    batch = loader.global_batch(2).micro_batches[0]
    assert (batch.mask, batch.padding) == ("none", None)


def test_where_nothing_looks_back_at_padding_it_is_known_and_needs_no_mask(tmp_path: Path) -> None:
    loader = GlobalBatchLoader(replace(numbered(6), causal=True), recipe(tmp_path, batch_size=6, micro_batch_size=6))
    (batch,) = loader.global_batch(0).micro_batches
    assert (batch.mask, batch.padding_mask) == ("none", None)
    assert batch.padding is not None
    assert batch.padding.sum() == 16


def test_a_global_batch_depends_on_its_index_alone(tmp_path: Path) -> None:
    settings = recipe(tmp_path, task="masked-lm", data=str(write_texts(tmp_path / "a.jsonl")))
    samples = prepare(settings, FACTS).train
    loader = GlobalBatchLoader(samples, settings)
    undisturbed = [loader.global_batch(k) for k in range(40)]
    for first in (1, 17, 39):
        again = GlobalBatchLoader(samples, settings)
        assert all(same(undisturbed[k], again.global_batch(k)) for k in range(first, 40))
    assert len({w.origin.split(",")[0] for w in undisturbed}) > 1  # it passed into another epoch


def _global_batches_of(pickled: bytes, indices: list[int]) -> list[GlobalBatch]:
    loader = pickle.loads(pickled)
    return [loader.global_batch(k) for k in indices]


@pytest.mark.parametrize("packing", [True, False])
def test_a_worker_process_makes_the_same_global_batches(packing: bool, tmp_path: Path) -> None:
    source = str(write_texts(tmp_path / "a.jsonl", 300))
    settings: Recipe = recipe(tmp_path, data={"source": source, "packing": packing})
    loader = GlobalBatchLoader(prepare(settings, FACTS).train, settings)
    expected = [loader.global_batch(k) for k in (0, 5, 3)]
    pickled = pickle.dumps(loader)
    assert len(pickled) < 5_000  # the tokens stay in their file
    with get_context("spawn").Pool(1) as pool:
        global_batches = pool.apply(_global_batches_of, (pickled, [0, 5, 3]))
    assert all(same(a, b) for a, b in zip(expected, global_batches, strict=True))


def test_a_loader_in_use_pickles_without_its_order(tmp_path: Path) -> None:
    loader = GlobalBatchLoader(numbered(100_000), recipe(tmp_path))
    first = loader.global_batch(0)
    assert len(pickle.dumps(loader)) < 2_000
    assert same(pickle.loads(pickle.dumps(loader)).global_batch(0), first)


def test_fewer_samples_than_a_global_batch(tmp_path: Path) -> None:
    few = r"batch_size: 3 training samples are fewer .* of 4; write batch_size=3 or less, "
    with pytest.raises(DataError, match=few + "data.packing=true for several samples of a long document, or more data"):
        GlobalBatchLoader(numbered(3), recipe(tmp_path))
    with pytest.raises(DataError, match=few + "or more data"):
        GlobalBatchLoader(numbered(3), recipe(tmp_path, data={"source": GIVEN_ROWS}))


def test_evaluation_is_the_same_each_time_and_bounded(tmp_path: Path) -> None:
    settings = recipe(tmp_path, eval_samples=10)
    once, twice = (list(evaluation_global_batches(numbered(31), settings)) for _ in range(2))
    assert all(same(a, b) for a, b in zip(once, twice, strict=True))
    assert [w.samples for w in once] == [4, 4, 2]
    numbers = shown(once)
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    assert numbers[-1] >= 27  # spread over all of them
    assert shown(list(evaluation_global_batches(numbered(3), settings))) == [0, 1, 2]


def test_labels_that_do_not_count_are_not_counted(tmp_path: Path) -> None:
    settings = recipe(tmp_path, data=str(write_texts(tmp_path / "a.jsonl")))
    loader = GlobalBatchLoader(prepare(settings, FACTS).train, settings)
    for k in range(len(loader)):
        global_batch = loader.global_batch(k)
        assert global_batch.count == sum(int((m.labels != IGNORE).sum()) for m in global_batch.micro_batches)
        assert global_batch.tokens == global_batch.samples * 16


def test_parts_of_a_global_batch_make_it_up_and_have_as_many_micro_batches(tmp_path: Path) -> None:
    whole = GlobalBatchLoader(numbered(11), recipe(tmp_path, batch_size=6, micro_batch_size=2))
    for of in (2, 4, 7):
        for index in range(4):
            parts = [whole.shard(rank, of).global_batch(index) for rank in range(of)]
            assert len({len(part.micro_batches) for part in parts}) == 1
            one = whole.global_batch(index)
            for name in ("count", "samples", "tokens"):
                assert sum(getattr(part, name) for part in parts) == getattr(one, name)
            counted = [int(row[0]) for part in parts for micro in part.micro_batches
                       for row, label in zip(micro.inputs["input_ids"], micro.labels, strict=True) if label != IGNORE]
            assert counted == shown([one])
            for micro in (micro for part in parts for micro in part.micro_batches if (micro.labels == IGNORE).all()):
                assert micro.padding is not None
                assert not micro.padding.any()
                assert micro.mask == "none"

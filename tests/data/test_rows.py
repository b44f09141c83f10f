"""A person's own tokenized rows as samples of every task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import MBartConfig
from transformers.models.mbart.modeling_mbart import shift_tokens_right

from tests.data.helpers import FACTS, recipe, texts, write_jsonl
from tightfit.data import GlobalBatchLoader, prepare
from tightfit.data.rows import COUNTED_ROWS, RowExamples
from tightfit.data.samples import padded
from tightfit.errors import DataError
from tightfit.model_facts import ModelFacts, facts_of
from tightfit.models import GIVEN_MODULE
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, MicroBatch

ROWS = [{"input_ids": [5, 6, 7 + i]} for i in range(10)]


def batch_of(
    rows: Any, tmp_path: Path, task: str = "causal-lm", facts: ModelFacts = FACTS, **changes: Any
) -> MicroBatch:
    settings = recipe(tmp_path, task=task, **changes)
    samples = padded(RowExamples.of(rows, settings, facts), settings, facts)
    return samples.batch(np.arange(len(samples)), 0)


def test_causal_rows_predict_their_own_tokens(tmp_path: Path) -> None:
    batch = batch_of([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], tmp_path)
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.labels.tolist() == [[6, 7, IGNORE], [9, IGNORE, IGNORE]]
    assert batch.mask == "none"


def test_rows_of_nothing_alone_are_of_padding(tmp_path: Path) -> None:
    batch = batch_of([{"input_ids": []}] * 2, tmp_path)
    assert batch.inputs["input_ids"].tolist() == [[0], [0]]
    assert batch.labels.tolist() == [[IGNORE], [IGNORE]]
    assert batch.padding is not None
    assert not batch.padding.any()


def test_causal_labels_are_shifted(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [IGNORE, IGNORE, 7, 8]}]
    assert batch_of(rows, tmp_path).labels.tolist() == [[IGNORE, 7, 8, IGNORE]]


def test_long_rows_are_cut_and_keep_the_last_label(tmp_path: Path) -> None:
    batch = batch_of([{"input_ids": list(range(1, 9))}], tmp_path, seq_len=4)
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert batch.labels.tolist() == [[2, 3, 4, 5]]


@pytest.mark.parametrize("row", [
    {"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0], "labels": [5, 6, IGNORE, IGNORE]},
    {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1], "labels": [IGNORE, IGNORE, 5, 6]},
])  # fmt: skip
def test_padding_that_came_along_is_dropped(row: dict[str, Any], tmp_path: Path) -> None:
    batch = batch_of([row], tmp_path)
    assert (batch.inputs["input_ids"].tolist(), batch.labels.tolist()) == ([[5, 6]], [[6, IGNORE]])


def test_classification_rows(tmp_path: Path) -> None:
    rows = [
        {"input_ids": np.array([5, 6, 7]), "token_type_ids": [0, 1, 1], "labels": 2},
        {"input_ids": np.array([8]), "token_type_ids": [1], "labels": np.int64(0)},
    ]
    batch = batch_of(
        rows, tmp_path, "sequence-classification", ModelFacts(vocab_size=400, num_labels=3, pad_token_id=9)
    )
    assert batch.labels.tolist() == [2, 0]
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.inputs["token_type_ids"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch.padding is not None
    assert batch.padding.tolist() == [[True] * 3, [True, False, False]]


def test_seq2seq_rows(tmp_path: Path) -> None:
    rows = [{"input_ids": [5], "labels": [6, IGNORE, 7, IGNORE]}, {"input_ids": [5, 6], "labels": [8]}]
    facts = ModelFacts(vocab_size=400, pad_token_id=1, decoder_start_token_id=2)
    batch = batch_of(rows, tmp_path, "seq2seq", facts)
    assert batch.inputs["decoder_input_ids"].tolist() == [[2, 6, 1, 7], [2, 1, 1, 1]]
    assert batch.labels.tolist() == [[6, IGNORE, 7, IGNORE], [8, IGNORE, IGNORE, IGNORE]]
    assert batch.mask == "padded"


def test_a_decoder_that_starts_with_the_end_of_its_target(tmp_path: Path) -> None:
    """As in transformers, whose mBART puts the last real label in front of the others."""
    config = MBartConfig(vocab_size=400, pad_token_id=1)
    facts = facts_of(config, Recipe(task="seq2seq"))
    labels = [[6, 7, 2, 99], [8, 9, 2, 98]]
    batch = batch_of([{"input_ids": [5], "labels": each} for each in labels], tmp_path, "seq2seq", facts)
    expected = shift_tokens_right(torch.from_numpy(batch.labels), 1)
    assert batch.inputs["decoder_input_ids"].tolist() == expected.tolist() == [[99, 6, 7, 2], [98, 8, 9, 2]]


def test_labels_that_are_shifted_already_are_refused(tmp_path: Path) -> None:
    for labels in ([6, 7, 8, 9], [IGNORE, 7, 8, IGNORE]):
        with pytest.raises(DataError, match=r"row 0 has the next tokens as its labels, .* remove labels to learn"):
            batch_of([{"input_ids": [5, 6, 7, 8], "labels": labels}], tmp_path)
    assert batch_of([{"input_ids": [5, 5, 5], "labels": [5, 5, 5]}], tmp_path).labels.tolist() == [[5, 5, IGNORE]]


@pytest.mark.parametrize("name", ["position_ids", "completion_mask", "decoder_input_ids", "loss_mask", "weight"])
def test_what_other_trainers_would_read_is_refused(tmp_path: Path, name: str) -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [5, 6], name: None}, {"input_ids": [5, 6], name: [0, 1], "id": 7}]
    with pytest.raises(DataError, match=f"row 1 holds {name}, which is not read here; remove it"):
        batch_of(rows, tmp_path)


def test_labels_by_the_names_that_collators_take(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6], "label": 2}, {"input_ids": [7], "label_ids": [1]}]
    assert batch_of(rows, tmp_path, "sequence-classification").labels.tolist() == [2, 1]
    rows = [{"input_ids": [5, 6], "label_ids": [IGNORE, 6]}]
    assert batch_of(rows, tmp_path, "masked-lm").labels.tolist() == [[IGNORE, 6]]


@pytest.mark.parametrize("held", [[0, 1], [1, 0]])
def test_token_types_that_a_row_leaves_out_are_0(tmp_path: Path, held: list[int]) -> None:
    rows = [{"input_ids": [5, 6], "labels": [5, 6], **({"token_type_ids": [1, 1]} if one else {})} for one in held]
    batch = batch_of(rows, tmp_path, "masked-lm")
    assert batch.inputs["token_type_ids"].tolist() == [[one, one] for one in held]


def test_a_row_that_raises_is_named(tmp_path: Path) -> None:
    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 2:
                raise KeyError("boom")
            return super().__getitem__(index)

    with pytest.raises(DataError, match="eval_dataset: row 2 cannot be read: KeyError: 'boom'") as raised:
        prepare(recipe(tmp_path), FACTS, dataset=ROWS, eval_dataset=Broken(ROWS))
    assert isinstance(raised.value.__cause__, KeyError)


def test_rows_that_are_cut_or_left_out_are_counted(tmp_path: Path) -> None:
    rows = [{"input_ids": [5] * length} for length in (3, 16, 17, 18, 30)]
    prepared = prepare(recipe(tmp_path), FACTS, dataset=rows, eval_dataset=ROWS * 30)
    assert prepared.notes == (
        "dataset: 2 of 5 rows are longer than seq_len=16 and cut there; write seq_len=30 for more of them",
        "eval_samples: 256 of the 300 rows to evaluate on are read; write eval_samples=null for all",
    )
    settings = recipe(tmp_path, seq_len=64, eval_samples=None)
    assert prepare(settings, FACTS, dataset=rows, eval_dataset=ROWS * 30).notes == ()


def test_masked_lm_and_image_rows(tmp_path: Path) -> None:
    batch = batch_of([{"input_ids": [5, 3], "labels": [IGNORE, 6]}], tmp_path, "masked-lm")
    assert batch.labels.tolist() == [[IGNORE, 6]]
    images = batch_of([{"pixel_values": np.ones((3, 2, 2)), "labels": 1}], tmp_path, "image-classification")
    assert images.inputs["pixel_values"].dtype == np.float32
    assert images.labels.tolist() == [1]


@pytest.mark.parametrize(("task", "rows", "data"), [
    ("causal-lm", [{"text": text} for text in texts(12)], {"packing": True}),
    ("causal-lm", [{"body": text, "text": 1} for text in texts(12)], {"text": "body", "packing": False}),
    ("causal-lm", [{"prompt": "the", "completion": text} for text in texts(12)], {}),
    ("sequence-classification", [{"text": text, "label": len(text) % 2} for text in texts(12)], {}),
    ("seq2seq", [{"text": text, "target": "tea"} for text in texts(12)], {}),
])  # fmt: skip
@pytest.mark.parametrize("held", [True, False])
def test_rows_that_are_not_tokenized_are_read_as_those_of_files(tmp_path, task, rows, data, held) -> None:
    settings = recipe(tmp_path, task=task, tokenizer="train", data=data)
    given = prepare(settings, FACTS, dataset=Dataset.from_list(rows), eval_dataset=rows[:4] if held else None)
    source = {"source": str(write_jsonl(tmp_path / "rows.jsonl", rows))}
    own = {"eval_source": str(write_jsonl(tmp_path / "own.jsonl", rows[:4]))} if held else {}
    stored = prepare(settings.override(data={**data, **source, **own}), FACTS)
    for one, other in ((given.train, stored.train), (given.evaluation, stored.evaluation)):
        assert one is not None
        assert other is not None
        assert len(one) == len(other)
        ours, theirs = (each.batch(np.arange(len(each)), 0) for each in (one, other))
        assert np.array_equal(ours.labels, theirs.labels)
        assert all(np.array_equal(ours.inputs[name], theirs.inputs[name]) for name in theirs.inputs)


def test_rows_of_text_that_changed_are_tokenized_anew(tmp_path: Path) -> None:
    settings = recipe(tmp_path, tokenizer="train")
    table = Dataset.from_list([{"text": text} for text in texts(20)])
    first, second = (prepare(settings, FACTS, dataset=table.select(range(begin, begin + 9))).train for begin in (0, 9))
    rows = np.arange(2)
    assert not np.array_equal(first.batch(rows, 0).labels, second.batch(rows, 0).labels)


def test_rows_of_text_take_their_evaluation_and_their_tokenizer_from_python_too(tmp_path: Path) -> None:
    rows = [{"text": text} for text in texts(12)]
    with pytest.raises(DataError, match=r"data.eval_source: .* as eval_dataset"):
        prepare(recipe(tmp_path, data={"eval_split": "test"}), FACTS, dataset=rows)
    with pytest.raises(DataError, match="tokenizer: a module given in Python comes without one; write tokenizer=<a"):
        prepare(recipe(tmp_path, model=GIVEN_MODULE), FACTS, dataset=rows)


@pytest.mark.parametrize(("task", "row", "message"), [
    ("causal-lm", {"ids": [1]}, "row 0 has no 'input_ids', which causal-lm needs; it has: ids; tokenize it, or"),
    ("masked-lm", {"input_ids": [1]}, "row 0 has no 'labels'"),
    ("causal-lm", {"input_ids": [400]}, r"400 among its input_ids, which should lie in 0 to 399; write vocab_size=401"),
    ("sequence-classification", {"input_ids": [4], "labels": 3}, "3 among its labels.* write num_labels=4"),
    ("causal-lm", {"input_ids": [4, 5], "labels": [4]}, "row 0 has 1 labels for 2 input_ids; .* task=sequence"),
    ("causal-lm", {"input_ids": [-5, 2]}, "-5 among its input_ids, which should lie in 0 to 399; change the data"),
    ("causal-lm", {"input_ids": [5, IGNORE]}, "-100 among its input_ids, which should lie in 0 to 399; change"),
    ("causal-lm", {"input_ids": torch.ones(2).requires_grad_()}, "as its input_ids, which should be integers"),
    ("causal-lm", {"input_ids": [1.9, 2]}, r"row 0 has \[1.9, 2\] as its input_ids, which should be integers"),
    ("causal-lm", {"input_ids": [10**30]}, "as its input_ids, which should be integers"),
    ("causal-lm", {"input_ids": [float("nan")]}, r"row 0 has \[nan\] as its input_ids, which should be integers"),
    ("causal-lm", {"input_ids": "words"}, "row 0 has 'words' as its input_ids, which should be integers"),
    ("causal-lm", {"input_ids": [[1, 2], [3, 4]]}, "as its input_ids, which should be integers, .* for one row"),
    ("causal-lm", {"input_ids": [1, 2, 3], "attention_mask": [1]}, "row 0 has an attention_mask of 1 for 3 input_ids"),
    ("causal-lm", [1, 2], "row 0 is of type list; give mappings such as"),
    ("seq2seq", {"input_ids": [4], "label": 1}, "row 0 has 1 as its labels, and seq2seq learns the tokens of a target"),
    ("sequence-classification", {"input_ids": [4], "labels": [0.0, 1.0]}, r"row 0 has .* as its labels, .* one class"),
])  # fmt: skip
def test_rows_that_do_not_serve(task: str, row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        batch_of([row], tmp_path, task)


def test_what_a_row_has_too_large_is_mended_for_all_rows_at_once(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 402]}, {"input_ids": [-1]}, {"input_ids": [5, 499, 6], "labels": [5, 520, 6]}]
    with pytest.raises(DataError, match=r"row 0 has 402 among its input_ids, .* 399; write vocab_size=521 or change"):
        batch_of(rows, tmp_path)
    classes = [{"input_ids": [5], "labels": label} for label in (0, 3, 2, 8)]
    with pytest.raises(DataError, match=r"row 1 has 3 among its labels, which .* 0 to 2; write num_labels=9 or change"):
        batch_of(classes, tmp_path, "sequence-classification")
    with pytest.raises(DataError, match=r"write vocab_size=521 or more, or change the data"):
        batch_of(rows * (COUNTED_ROWS * 2 // 5), tmp_path)


def test_rows_of_a_batch_of_one_are_rows(tmp_path: Path) -> None:
    rows = [{"input_ids": np.array([[5, 6, 7]]), "attention_mask": [[1, 1, 0]]}, {"input_ids": [8.0]}]
    batch = batch_of(rows, tmp_path)
    assert batch.inputs["input_ids"].tolist() == [[5, 6], [8, 0]]


def test_columns_are_no_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset: a mapping of columns has no rows; give .*from_dict"):
        batch_of({"input_ids": [[1, 2]]}, tmp_path)


@pytest.mark.parametrize(("rows", "message"), [
    (DatasetDict({name: Dataset.from_list(ROWS) for name in ("a", "b")}), r"give one of them, by \['a'\] or \['b'\]"),
    (pandas.DataFrame(ROWS), r"a DataFrame gives columns and no rows; give datasets.Dataset.from_pandas\("),
    ([], "dataset: it has no rows"), (torch.utils.data.DataLoader(ROWS), r"DataLoader does not give .* own \.dataset"),
])  # fmt: skip
def test_what_holds_no_rows_is_refused(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        batch_of(rows, tmp_path)


def test_rows_without_a_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset: generator has no length, as streamed data .*streaming=False"):
        prepare(recipe(tmp_path), FACTS, dataset=({"input_ids": [5]} for _ in range(3)))


def test_rows_of_their_own_to_evaluate_on(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7 + i]} for i in range(10)]
    prepared = prepare(recipe(tmp_path), FACTS, dataset=rows[:7], eval_dataset=rows[7:])
    assert prepared.evaluation is not None
    assert (len(prepared.train), len(prepared.evaluation)) == (7, 3)
    with pytest.raises(DataError, match=r"eval_dataset: .*give dataset too"):
        prepare(recipe(tmp_path), FACTS, eval_dataset=rows)
    for source in (str(tmp_path), "dummy"):
        settings = recipe(tmp_path, data={"source": source, "eval_source": "held.jsonl"})
        with pytest.raises(DataError, match=r"data.eval_source: .*(as eval_dataset|data.eval_fraction)"):
            prepare(settings, FACTS, dataset=None if source == "dummy" else rows)


def test_labels_that_are_all_ignored_are_refused(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, -100, -100]} for _ in range(10)]
    settings = recipe(tmp_path, data={"source": "unused", "eval_fraction": 0})
    with pytest.raises(DataError, match=r"every label of the 10 training samples is -100, .*write the labels"):
        GlobalBatchLoader(prepare(settings, FACTS, dataset=rows).train, settings).require_labels()
    rows[4] = {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}
    GlobalBatchLoader(prepare(settings, FACTS, dataset=rows).train, settings).require_labels()


def test_a_dataset_of_the_datasets_library(tmp_path: Path) -> None:
    import datasets

    rows = [{"input_ids": [5, 6, 7 + i]} for i in range(10)]
    settings = recipe(tmp_path, data={"source": "unused", "eval_fraction": 0.2})
    prepared = prepare(settings, FACTS, dataset=datasets.Dataset.from_list(rows))
    assert prepared.evaluation is not None
    assert (len(prepared.train), len(prepared.evaluation)) == (8, 2)
    both = [s.batch(np.arange(len(s)), 0).inputs["input_ids"][:, 2].tolist() for s in
            (prepared.train, prepared.evaluation)]  # fmt: skip
    assert sorted(both[0] + both[1]) == list(range(7, 17))
    assert (prepared.tokenizer, prepared.unigram_loss) == (None, None)

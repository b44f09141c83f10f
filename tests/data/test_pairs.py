"""Pairs of texts: the inputs that transformers makes of them, and a model that learns from both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import tightfit
from tests.data.helpers import FACTS, WORDS, recipe, texts, write_jsonl
from tightfit.data import prepare
from tightfit.data.samples import pair_inputs
from tightfit.data.tokenizing import load_tokenizer
from tightfit.errors import DataError

LETTERS = [chr(place) for place in range(33, 127)] + ["Ġ"]


def bert_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(word for word in WORDS if word.isascii())]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return folder


def roberta_folder(folder: Path) -> Path:
    vocab = {token: place for place, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *LETTERS])}
    transformers.RobertaTokenizer(vocab=vocab, merges=[]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("made", [bert_folder, roberta_folder])
def test_pairs_are_cut_as_transformers_cuts_the_longer_text_first(tmp_path: Path, made: Any) -> None:
    folder = made(tmp_path / "tokenizer")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(str(folder), trust_remote_code=False)
    pairs = list(zip(texts(60), texts(60, seed=1), strict=True))
    encoded = ours.encode_pairs(pairs)
    lengths = {len(ids) for ids, _ in encoded}
    for length in (5, 8, 13, 32, max(lengths)):
        for (first, second), (ids, sides) in zip(pairs, encoded, strict=True):
            expected = theirs(first, second, truncation="longest_first", max_length=length)
            found = pair_inputs(ids, sides, length)
            assert found["input_ids"].tolist() == expected["input_ids"]
            assert ("token_type_ids" in found) == ("token_type_ids" in expected)
            assert found.get("token_type_ids", np.zeros(0)).tolist() == expected.get("token_type_ids", [])


def pairs_recipe(tmp_path: Path, **changes: Any) -> Any:
    rows = [{"premise": a, "hypothesis": b, "label": n % 3}
            for n, (a, b) in enumerate(zip(texts(40), texts(40, seed=1), strict=True))]
    source = str(write_jsonl(tmp_path / "pairs.jsonl", rows))
    data = {"source": source, "text": "premise", "text_pair": "hypothesis", **changes.pop("data", {})}
    return recipe(tmp_path, **{"task": "sequence-classification", "model": "bert-base", "data": data, **changes})


def test_a_tokenizer_trained_here_puts_its_end_between_the_texts_of_a_pair(tmp_path: Path) -> None:
    prepared = prepare(pairs_recipe(tmp_path, seq_len=64), FACTS)
    assert prepared.tokenizer is not None
    batch = prepared.train.batch(np.arange(4), 0)
    first, second = texts(40), texts(40, seed=1)
    known = {(a + b).replace("\n", " ").split().__repr__() for a, b in zip(first, second, strict=True)}
    assert batch.padding is not None
    for row, real in zip(batch.inputs["input_ids"], batch.padding, strict=True):
        assert (row[real] == prepared.tokenizer.end_id).sum() == 1
        assert prepared.tokenizer.decode(row[real]).split().__repr__() in known


def test_evaluation_of_pairs_is_transformers_own_of_the_saved_model(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "model")
    config = transformers.BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=16, max_position_embeddings=32, num_labels=3,
                                     initializer_range=0.5)
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    held = [{"premise": a, "hypothesis": b, "label": n % 3}
            for n, (a, b) in enumerate(zip(texts(7, seed=2), texts(7, seed=3), strict=True))]
    held_out = write_jsonl(tmp_path / "held.jsonl", held)
    run = tmp_path / "run"
    summary = tightfit.Trainer(recipe=pairs_recipe(
        tmp_path, model=str(folder), vocab_size=None, seq_len=12, max_steps=3, device="cpu", precision="fp32",
        learning_rate=1e-2, output_dir=str(run), data={"eval_source": str(held_out)})).train()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    rows = tokenizer([row["premise"] for row in held], [row["hypothesis"] for row in held], padding=True,
                     truncation="longest_first", max_length=12, return_tensors="pt")
    assert rows["token_type_ids"].any()
    with torch.no_grad():
        loss = model(**rows, labels=torch.tensor([row["label"] for row in held])).loss.item()
        alone = model(**{**rows, "token_type_ids": torch.zeros_like(rows["token_type_ids"])},
                      labels=torch.tensor([row["label"] for row in held])).loss.item()
    assert summary.eval_loss == pytest.approx(loss, rel=1e-5)
    assert summary.eval_loss != pytest.approx(alone, rel=1e-5)


def test_pairs_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.text_pair: causal-lm reads one text a row; write task=sequence-class"):
        prepare(pairs_recipe(tmp_path, task="causal-lm", model="gpt2"), FACTS)
    with pytest.raises(DataError, match=r"data\.text_pair: .* has no field 'other'; it has premise, hypothesis, label"):
        prepare(pairs_recipe(tmp_path, data={"text_pair": "other"}), FACTS)

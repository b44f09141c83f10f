"""Small recipes, corpora and checks that the tests of data share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import Array, GlobalBatch, MicroBatch

FACTS = ModelFacts(vocab_size=400, num_labels=3, max_positions=64)

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "café", "serves", "naïve", "tea", "—", "1234")


def recipe(tmp_path: Path, **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "seq_len": 16, "batch_size": 4, "micro_batch_size": 2, "vocab_size": 400, "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    return Recipe.from_dict({**values, **changes})


def texts(count: int, seed: int = 0) -> list[str]:
    """Random texts of 1 to 30 words."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, 31))) + "\n" for _ in range(count)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_texts(path: Path, count: int = 30, seed: int = 0) -> Path:
    return write_jsonl(path, [{"text": text} for text in texts(count, seed)])


def arrays(batch: MicroBatch) -> dict[str, Array]:
    found = {**batch.inputs, "labels": batch.labels, "padding": batch.padding, "document_ids": batch.document_ids}
    return {name: value for name, value in found.items() if value is not None}


def same(one: GlobalBatch, other: GlobalBatch) -> bool:
    """Whether two global batches are equal to the last bit."""
    facts = [(w.count, w.samples, w.tokens, w.origin, len(w.micro_batches)) for w in (one, other)]
    if facts[0] != facts[1]:
        return False
    for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
        left, right = arrays(a), arrays(b)
        if a.mask != b.mask or left.keys() != right.keys():
            return False
        if any(v.dtype != right[k].dtype or not np.array_equal(v, right[k]) for k, v in left.items()):
            return False
    return True

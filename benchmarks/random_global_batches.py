"""Global batches of random tokens or images, in the form that a recipe's data has: plain, padded, or packed with
documents."""

from __future__ import annotations

from typing import Any

import numpy as np

from tightfit.backends.pytorch.batch import TensorGlobalBatch, tensor_global_batch
from tightfit.backends.pytorch.simulate.fake_global_batches import micro_batch_sizes, padded_length
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import DOCUMENTS_A_ROW, ArraySpec, MicroBatch, Task, global_batch_of


def random_global_batch(
    recipe: Recipe, task: Task, facts: ModelFacts, seed: int, documents: int = DOCUMENTS_A_ROW
) -> TensorGlobalBatch:
    """A full global batch, all its labels counting but those of padding. recipe: resolved. documents: in a packed
    row."""
    random = np.random.default_rng(seed)
    batches = tuple(
        random_micro_batch(recipe, task, facts, rows, random, documents) for rows in micro_batch_sizes(recipe))
    return tensor_global_batch(global_batch_of(batches, f"random, seed {seed}"))


def random_micro_batch(
    recipe: Recipe, task: Task, facts: ModelFacts, rows: int, random: np.random.Generator,
    documents: int = DOCUMENTS_A_ROW,
) -> MicroBatch:  # fmt: skip
    """A micro-batch as long as planning takes it to be: the longest row of padded documents is full."""
    written = recipe.data.source != "dummy" and task.reads == "tokens"
    packed = written and task.packs and recipe.data.packing
    padded = written and not packed and task.predicts != "next"
    length = padded_length(recipe) if written and not packed else recipe.seq_len
    spec = task.batch_spec(rows, length, facts, packed)
    inputs = {name: _drawn(random, array) for name, array in spec.inputs.items()}
    labels = _drawn(random, spec.labels)
    if packed:
        ids, inputs["position_ids"] = _documents(random, rows, length, documents)
        return MicroBatch(inputs=inputs, labels=labels, mask="packed", document_ids=ids)
    if padded:
        lengths = random.integers(length // 2, length + 1, rows)
        lengths[0] = length
        real = np.arange(length) < lengths[:, None]
        return MicroBatch(inputs=inputs, labels=labels, mask="padded", padding=real)
    return MicroBatch(inputs=inputs, labels=labels, mask=spec.mask)


def _documents(random: np.random.Generator, rows: int, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The document of each token, int32 (rows, length), and its position in it, int64 (rows, length)."""
    ids = np.zeros((rows, length), dtype=np.int32)
    positions = np.zeros((rows, length), dtype=np.int64)
    for row in range(rows):
        cuts = np.sort(random.choice(np.arange(1, length), min(count, length) - 1, replace=False))
        starts = np.concatenate(([0], cuts))
        ids[row] = np.searchsorted(cuts, np.arange(length), side="right")
        positions[row] = np.arange(length) - starts[ids[row]]
    return ids, positions


def _drawn(random: np.random.Generator, spec: ArraySpec) -> Any:
    if spec.high:
        return random.integers(spec.low, spec.high, spec.shape, dtype=spec.dtype)
    return random.standard_normal(spec.shape, dtype=np.dtype(spec.dtype).type)

"""Random samples of a task's shapes, for speed and memory without data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tightfit.data.masking import generator
from tightfit.models import ModelFacts
from tightfit.tasks import Array, ArraySpec, MicroBatch, Task


@dataclass(frozen=True, kw_only=True)
class Dummy:
    """`samples` random rows of `seq_len` tokens, or images, each a pure function of the seed and its index.

    part: 0 for training, 1 for evaluation; the two differ. Where a task predicts next tokens, labels are the row's.
    """

    task: Task
    facts: ModelFacts
    seq_len: int
    samples: int
    seed: int
    part: int = 0

    def __len__(self) -> int:
        return self.samples

    def numbers(self, indices: Array) -> Array:
        return indices

    def batch(self, indices: Array, epoch: int) -> tuple[MicroBatch, int]:
        spec = self.task.batch_spec(1, self.seq_len, self.facts)
        rows = [self._row(int(index), {**spec.inputs, "labels": spec.labels}) for index in indices]
        arrays = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        labels = arrays.pop("labels")
        tokens = arrays["input_ids"].size if "input_ids" in arrays else len(indices)
        return MicroBatch(inputs=arrays, labels=labels, mask=spec.mask), int(tokens)

    def _row(self, index: int, specs: dict[str, ArraySpec]) -> dict[str, Array]:
        random = generator(self.seed, self.part, index)
        if self.task.predicts == "next":
            drawn = random.integers(0, self.facts.vocab_size, (1, self.seq_len + 1))
            return {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}
        return {name: _draw(random, spec) for name, spec in specs.items()}


def _draw(random: np.random.Generator, spec: ArraySpec) -> Array:
    if spec.high:
        return random.integers(spec.low, spec.high, spec.shape, dtype=spec.dtype)
    return random.standard_normal(spec.shape, dtype=np.dtype(spec.dtype).type)

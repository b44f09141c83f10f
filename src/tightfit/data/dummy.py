"""Random samples, for runs that need no data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tightfit.data.samples import Example, generator, next_tokens
from tightfit.model_facts import ModelFacts
from tightfit.tasks import Array, ArraySpec, Task


@dataclass(frozen=True, kw_only=True)
class Dummy:
    """`count` random examples of `seq_len` tokens, or images, each a pure function of the seed and its index.

    part: 0 for training, 1 for evaluation; the two differ. Where a task predicts next tokens, labels are the row's.
    """

    task: Task
    facts: ModelFacts
    seq_len: int
    count: int
    seed: int
    part: int = 0

    def __len__(self) -> int:
        return self.count

    def example(self, index: int, epoch: int) -> Example:
        random = generator(self.seed, self.part, index)
        if self.task.predicts == "next":
            return next_tokens(random.integers(0, self.facts.vocab_size, self.seq_len + 1), self.seq_len)
        spec = self.task.batch_spec(1, self.seq_len, self.facts)
        return Example({name: _draw(random, array) for name, array in spec.inputs.items()}, _draw(random, spec.labels))


def _draw(random: np.random.Generator, spec: ArraySpec) -> Array:
    """Random values of a micro-batch of one, without its batch dimension."""
    if spec.high:
        return np.asarray(random.integers(spec.low, spec.high, spec.shape, dtype=spec.dtype)[0])
    return np.asarray(random.standard_normal(spec.shape, dtype=np.dtype(spec.dtype).type)[0])

"""Global batches as arrays, prepared ahead of the step in threads: a process that runs JAX cannot be forked.

Every micro-batch is padded to as many rows of as many tokens, one compilation for all; what is added carries ignored
labels, so that it weighs nothing. A global batch is a pure function of its index, so resuming is starting at the next
index, exact with any number of threads.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tightfit.backends.base import GlobalBatchSource
from tightfit.backends.jax.build import Build
from tightfit.errors import ModelError
from tightfit.tasks import IGNORE, Array, BatchTotals, GlobalBatch, MicroBatch

PAD_VALUES = {"input_ids": 0, "position_ids": 0, "labels": IGNORE, "document_ids": -1, "padding": 0}
"""Fill values of the rows and columns that are added, by array."""


@dataclass(frozen=True, kw_only=True)
class ArrayGlobalBatch(BatchTotals):
    """A global batch's micro-batches stacked: each array is (micro-batches, rows, tokens), int32 or, for padding,
    bool."""

    arrays: dict[str, Array]


def stack_micro_batches(
    global_batch: GlobalBatch, micro_batches: int, rows: int, looks_ahead: bool = False
) -> ArrayGlobalBatch:
    """The global batch with at least as many micro-batches, of at least as many rows each. Its micro-batches need not
    be of one length; the longest counts, and what is added to others is padding for a model that looks ahead.

    Raises ModelError for arrays that the models here do not read.
    """
    lengths = {batch.labels.shape[1] for batch in global_batch.micro_batches}
    length, kinds = max(lengths), {batch.mask for batch in global_batch.micro_batches}
    padded = "padded" in kinds or (looks_ahead and len(lengths) > 1 and "packed" not in kinds)
    parts = [_arrays(batch, padded) for batch in global_batch.micro_batches]
    count, rows = max(micro_batches, len(parts)), max(rows, *(part["labels"].shape[0] for part in parts))
    arrays = {}
    for name, first in parts[0].items():
        whole = np.full((count, rows, length), PAD_VALUES[name], dtype=first.dtype)
        for place, part in zip(whole, parts, strict=False):
            place[: part[name].shape[0], : part[name].shape[1]] = part[name]
        arrays[name] = whole
    return ArrayGlobalBatch(arrays=arrays, **global_batch.totals)


def stack_for(build: Build, global_batch: GlobalBatch) -> ArrayGlobalBatch:
    """The global batch as a build's programs take it."""
    return stack_micro_batches(global_batch, build.micro_batches, build.rows, build.task.predicts != "next")


def array_dtype(name: str) -> np.dtype[np.generic]:
    """The number format of the array of that name."""
    return np.dtype(bool) if name == "padding" else np.dtype(np.int32)


def _arrays(batch: MicroBatch, padded: bool) -> dict[str, Array]:
    """Arrays of a micro-batch, by name. padded: whether a padding mask is among them; where the micro-batch has no
    padding, it is true everywhere."""
    if unknown := set(batch.inputs) - set(PAD_VALUES):
        raise ModelError(f"model: the models of backend: jax read input_ids alone, and the data also has "
                         f"{', '.join(sorted(unknown))}; leave it out, or write backend=pytorch")
    found = {**batch.inputs, "labels": batch.labels}
    if batch.document_ids is not None:
        found["document_ids"] = batch.document_ids
    if padded:
        found["padding"] = np.ones(batch.labels.shape, bool) if batch.padding is None else batch.padding
    return {name: array.astype(array_dtype(name)) for name, array in found.items()}


def global_batches(
    build: Build, source: GlobalBatchSource, start: int, stop: int, workers: int | None = None
) -> Generator[ArrayGlobalBatch]:
    """The global batches from `start` up to, not including, `stop`, prepared ahead as the recipe's loading says.
    workers: threads in place of the recipe's."""
    prefetch = build.recipe.loading.prefetch
    if workers is None:
        assert build.recipe.loading.workers != "auto", "resolve the recipe first"
        workers = build.recipe.loading.workers
    if not workers:
        for number in range(start, stop):
            yield stack_for(build, source.global_batch(number))
        return
    frozen, own = pickle.dumps(source), threading.local()

    def begin() -> None:  # a source keeps what it last ordered, so each thread has its own
        own.source = pickle.loads(frozen)

    def make(index: int) -> ArrayGlobalBatch:
        return stack_for(build, own.source.global_batch(index))

    coming: deque[Future[ArrayGlobalBatch]] = deque()
    threads = ThreadPoolExecutor(workers, thread_name_prefix="global batches", initializer=begin)
    try:
        for index in range(start, stop):
            coming.append(threads.submit(make, index))
            if len(coming) > workers * prefetch:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)

"""Global batches prepared ahead of the step: torch's DataLoader over global batch indices.

A global batch is a pure function of its index, so resuming is starting at the next index, exact with any number of
workers. Workers send it as arrays, through a pipe: a tensor would take a file descriptor each, of which a global batch
of many micro-batches needs hundreds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods, get_start_method

import torch
from torch.utils.data import DataLoader, Dataset

from tightfit.backends.base import GlobalBatchSource
from tightfit.backends.pytorch.batch import TensorGlobalBatch, tensor_global_batch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.world import lost_process_guard
from tightfit.errors import Refused, TightfitError, limit_advice
from tightfit.tasks import GlobalBatch
from tightfit.techniques.loading import Loading
from tightfit.text import counted


@dataclass(frozen=True)
class _Made:
    """A global batch, as arrays or in pinned memory, or why there is none: DataLoader would bury a worker's error in a
    traceback of its own."""

    made: GlobalBatch | TensorGlobalBatch | TightfitError

    def tensors(self) -> TensorGlobalBatch:
        if isinstance(self.made, TightfitError):
            raise self.made
        return self.made if isinstance(self.made, TensorGlobalBatch) else tensor_global_batch(self.made)

    def pin_memory(self) -> _Made:
        """Called by DataLoader, in a thread of its own where there are workers."""
        return self if isinstance(self.made, TightfitError) else _Made(self.tensors().pin_memory())


class _GlobalBatches(Dataset[_Made]):
    def __init__(self, source: GlobalBatchSource) -> None:
        self.source = source

    def __getitem__(self, index: int) -> _Made:
        try:
            return _Made(self.source.global_batch(index))
        except TightfitError as error:
            return _Made(error)


class _Loader(DataLoader[_Made]):
    def check_worker_number_rationality(self) -> None:
        """No warning of more workers than cores, which torch's gives twice and a session has said."""


FILES_OF_WORKER = 3
"""Pipes, of two files each, that a worker takes while it is started, and that all of them share."""


def _start_worker(number: int) -> None:
    """Leave Ctrl-C, and what is sent to a whole process group, to the training process: it takes its step, saves, and
    then stops its workers."""
    if hasattr(os, "setpgid"):  # on Windows no signals come so
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _start_method() -> str | None:
    """`fork` on Linux, unless the caller has chosen another: the default from Python 3.14 on would run the caller's
    script again in each worker, and hand over rows by pickling them."""
    by_default = get_start_method(allow_none=True) in (None, get_all_start_methods()[0])
    return "fork" if sys.platform == "linux" and by_default else None


def _require_pipes(workers: int) -> None:
    """Raises Refused where this process may not open as many files as workers need: DataLoader would fail half-way, and
    again as it is taken down."""
    pipes: list[int] = []
    try:
        for _ in range(FILES_OF_WORKER * (workers + 1) if workers else 0):
            pipes += os.pipe()
    except OSError as error:
        raise Refused(f"loading.workers: {counted(workers, 'worker')} cannot be started: {error.strerror}; "
                      f"write loading.workers=0, or {limit_advice(error, '')}") from None
    finally:
        for file in pipes:
            os.close(file)


def loading(technique: Loading, build: Build) -> Build:
    def global_batches(
        source: GlobalBatchSource, start: int, stop: int, workers: int | None
    ) -> Iterator[TensorGlobalBatch]:
        if workers is None:
            assert technique.workers != "auto", "resolve the recipe first"
            workers = technique.workers
        _require_pipes(workers)
        loader = _Loader(
            _GlobalBatches(source),
            batch_size=None,
            sampler=range(start, stop),
            num_workers=workers,
            multiprocessing_context=_start_method() if workers else None,
            prefetch_factor=technique.prefetch if workers else None,
            pin_memory=technique.pin_memory and build.torch_device.type == "cuda",
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # its own, so that starting workers draws nothing from the run's stream
        )
        with lost_process_guard():
            for made in loader:  # nothing else refers to its iterator, so that an error, too, ends the workers at once
                yield made.tensors()

    return replace(build, global_batches=global_batches)

"""Global batches made in workers: their errors, their file descriptors, and signals."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.built import built
from tightfit.backends.pytorch.batch import TensorGlobalBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.loading import loading
from tightfit.errors import DataError, LostProcess, MissingLibrary, Refused
from tightfit.tasks import GlobalBatch, MicroBatch, global_batch_of
from tightfit.techniques.loading import Loading
from tightfit.training.stopping import StopRequest


@dataclass(frozen=True)
class Source:
    """Global batches of `micro_batches` packed rows of their index; their origin is the process that made them."""

    micro_batches: int = 1
    fails_at: int = -1

    def global_batch(self, index: int) -> GlobalBatch:
        if index == self.fails_at:
            raise DataError(f"data: global batch {index} cannot be read")
        row = np.full((1, 8), index, dtype=np.int64)
        made = partial(MicroBatch, labels=row, mask="packed", document_ids=row.astype(np.int32))
        batches = [made(inputs={"input_ids": row + 0, "position_ids": row + 0}) for _ in range(self.micro_batches)]
        return global_batch_of(tuple(batches), origin=str(os.getpid()))


@pytest.fixture
def build(tiny) -> Build:
    return built(tiny)


def global_batches(build: Build, source: Source, workers: int, stop: int = 12) -> Iterator[TensorGlobalBatch]:
    made = loading(Loading(workers=workers, prefetch=1), build).global_batches
    assert made is not None
    return made(source, 0, stop, None)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_arrives_as_it_was_raised_in_its_place(build, workers):
    made = global_batches(build, Source(fails_at=2), workers)
    assert [int(next(made).micro_batches[0].labels[0, 0]) for _ in range(2)] == [0, 1]
    with pytest.raises(DataError) as caught:
        next(made)
    assert str(caught.value) == "data: global batch 2 cannot be read"
    assert multiprocessing.active_children() == []


def test_a_missing_library_survives_the_way_from_a_worker():
    error = MissingLibrary("pillow", "data: a folder of images")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is MissingLibrary
    assert str(again) == str(error)
    assert str(error).startswith("data: a folder of images needs the library pillow,")
    assert str(error).endswith("run: pip install 'tightfit[images]'")


def test_a_global_batch_of_many_micro_batches_needs_few_file_descriptors(build):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        made = list(global_batches(build, Source(micro_batches=64), workers=2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(made) == 12
    for index, global_batch in enumerate(made):
        assert global_batch.count == 64 * 8
        for batch in global_batch.micro_batches:
            assert batch.labels.tolist() == batch.inputs["input_ids"].tolist() == [[index] * 8]
            assert batch.document_starts is not None
            assert batch.document_starts.tolist() == [0, 8]


def test_workers_for_whose_pipes_there_is_no_room_are_refused(build):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 8, hard))
    try:
        with pytest.raises(Refused, match=r"2 workers cannot be started.*write loading.workers=0"):
            list(global_batches(build, Source(), workers=2))
        assert len(list(global_batches(build, Source(), workers=0))) == 12
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_signals_to_stop_are_the_training_process_own(build):
    with StopRequest(lambda by, again: None):
        made = global_batches(build, Source(), workers=1)
        worker = int(next(made).origin)
        assert worker != os.getpid()
        assert os.getpgid(worker) == worker  # what a terminal or `timeout` sends to the group passes it by
        os.kill(worker, signal.SIGINT)
        assert [int(next(made).origin) for _ in range(6)] == [worker] * 6
        os.kill(worker, signal.SIGTERM)  # the handler that a fork inherits would go on
        with pytest.raises(LostProcess, match=r"^loading\.workers: a process that prepares data was killed"):
            list(made)


SCRIPT = """
import tightfit
summary = tightfit.Trainer(recipe={values!r}).train()
print("steps:", summary.steps)
"""


def test_a_script_that_guards_nothing_trains_with_workers(tiny, tmp_path):
    """From Python 3.14 on, multiprocessing's default start method would run it again in each worker."""
    values = {**tiny, "max_steps": 2, "loading": {"workers": 1}}
    (tmp_path / "script.py").write_text(SCRIPT.format(values=values))
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert done.stdout == "steps: 2\n", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_global_batches_arrive_in_pinned_memory(tiny, workers):
    made = global_batches(built({**tiny, "device": "cuda"}), Source(micro_batches=3, fails_at=2), workers)
    batches = [batch for _ in range(2) for batch in next(made).micro_batches]
    assert all(batch.labels.is_pinned() and batch.inputs["input_ids"].is_pinned() for batch in batches)
    with pytest.raises(DataError, match=r"^data: global batch 2 cannot be read$"):
        next(made)

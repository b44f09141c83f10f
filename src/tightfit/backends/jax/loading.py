"""Windows prepared ahead of the step, in threads: a process that runs JAX cannot be forked.

A window is a pure function of its index, so resuming is starting at the next index, exact with any number of threads.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import cast

from tightfit.backends.base import WindowSource
from tightfit.backends.jax.batch import ArrayWindow, array_window
from tightfit.backends.jax.build import Build
from tightfit.techniques.loading import Loading


def loading(technique: Loading, build: Build) -> Build:
    workers, prefetch = technique.workers, technique.prefetch
    assert workers != "auto", "resolve the recipe first"
    micro_batches, rows = build.micro_batches, build.rows

    def windows(source: WindowSource, start: int, stop: int) -> Iterator[ArrayWindow]:
        if not workers:
            return (array_window(source.window(index), micro_batches, rows) for index in range(start, stop))
        return _ahead(source, start, stop, workers, prefetch)

    def _ahead(source: WindowSource, start: int, stop: int, workers: int, prefetch: int) -> Iterator[ArrayWindow]:
        frozen, own = pickle.dumps(source), threading.local()

        def make(index: int) -> ArrayWindow:
            if not hasattr(own, "source"):  # a source keeps what it last ordered, so each thread has its own
                own.source = pickle.loads(frozen)
            return array_window(cast(WindowSource, own.source).window(index), micro_batches, rows)

        coming: deque[Future[ArrayWindow]] = deque()
        threads = ThreadPoolExecutor(workers, thread_name_prefix="windows")
        try:
            for index in range(start, stop):
                coming.append(threads.submit(make, index))
                if len(coming) > workers * prefetch:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)

    return replace(build, windows=windows)

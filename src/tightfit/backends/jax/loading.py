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

from tightfit.backends.base import WindowSource
from tightfit.backends.jax.batch import ArrayWindow, array_window
from tightfit.backends.jax.build import Build
from tightfit.techniques.loading import Loading


def loading(technique: Loading, build: Build) -> Build:
    workers, prefetch = technique.workers, technique.prefetch
    assert workers != "auto", "resolve the recipe first"

    def windows(source: WindowSource, start: int, stop: int) -> Iterator[ArrayWindow]:
        if not workers:
            yield from (array_window(source.window(n), build.micro_batches, build.rows) for n in range(start, stop))
            return
        frozen, own = pickle.dumps(source), threading.local()

        def begin() -> None:  # a source keeps what it last ordered, so each thread has its own
            own.source = pickle.loads(frozen)

        def make(index: int) -> ArrayWindow:
            return array_window(own.source.window(index), build.micro_batches, build.rows)

        coming: deque[Future[ArrayWindow]] = deque()
        threads = ThreadPoolExecutor(workers, thread_name_prefix="windows", initializer=begin)
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

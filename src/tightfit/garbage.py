"""Pausing Python's cyclic garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Collector:
    """The process's collector. turn: held by the thread that collects by hand. paused: whether one does so."""

    def __init__(self) -> None:
        self.turn, self.paused = threading.RLock(), False


COLLECTOR = Collector()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Context in which cycles of Python objects are freed where `gc.collect` is called and nowhere else, and what
    exists already is left out of that. Work that makes many objects and few cycles does not wait for the collector,
    which would go through all of them again and again; and what it finds does not hang on when the collector happens to
    run. One thread at a time does such work, others wait."""
    with COLLECTOR.turn:
        if COLLECTOR.paused:  # thawing here would end it for the work around
            yield
            return
        enabled, COLLECTOR.paused = gc.isenabled(), True
        gc.disable()
        gc.freeze()
        try:
            yield
        finally:
            COLLECTOR.paused = False
            gc.unfreeze()
            if enabled:
                gc.enable()

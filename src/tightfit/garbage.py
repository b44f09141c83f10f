"""Pausing Python's cyclic garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTOR_LOCK = threading.RLock()
"""Held by the thread that collects by hand."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Context in which cycles of Python objects are freed where `gc.collect` is called and nowhere else, and what
    exists already is left out of that. Work that makes many objects and few cycles does not wait for the collector,
    which would go through all of them again and again; and what it finds does not hang on when the collector happens to
    run. One thread at a time does such work, others wait."""
    with COLLECTOR_LOCK:
        if not gc.isenabled():  # thawing here would end it for the work around
            yield
            return
        gc.disable()
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
            gc.enable()

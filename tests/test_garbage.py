"""When Python's collector of cycles runs."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from tightfit.garbage import gc_paused


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_are_freed_by_hand_alone_and_the_collector_goes_on_afterwards():
    with gc_paused():
        assert not gc.isenabled()
        gone = weakref.ref(Node())
        assert gone() is not None
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        gc.collect()
        assert gone() is None
    assert gc.isenabled()


def test_the_collector_goes_on_after_an_error():
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()


def test_one_thread_at_a_time_collects_by_hand():
    begun, inside = threading.Event(), []

    def work() -> None:
        begun.set()
        with gc_paused():
            inside.append("other")

    other = threading.Thread(target=work)
    with gc_paused():
        other.start()
        assert begun.wait(60)
        other.join(0.05)
        inside.append("first")
        with gc_paused():
            inside.append("first again")
    other.join(60)
    assert inside == ["first", "first again", "other"]

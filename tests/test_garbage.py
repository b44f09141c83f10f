"""When Python's collector of cycles runs."""

from __future__ import annotations

import gc
import weakref

import pytest

from tightfit.garbage import collected_by_hand


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_are_freed_by_hand_alone_and_the_collector_goes_on_afterwards():
    with collected_by_hand():
        assert not gc.isenabled()
        gone = weakref.ref(Node())
        assert gone() is not None
        with collected_by_hand():
            assert not gc.isenabled()
        assert not gc.isenabled()
        gc.collect()
        assert gone() is None
    assert gc.isenabled()


def test_the_collector_goes_on_after_an_error():
    with pytest.raises(KeyError), collected_by_hand():
        raise KeyError
    assert gc.isenabled()

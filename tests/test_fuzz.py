"""The fuzzer: what counts as a failure, and which seed of a process it is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.benchmark_modules import benchmark

harness = benchmark("fuzzing.harness")
Said = harness.Said


@pytest.mark.parametrize(("said", "wrong"), [
    (Said(0, "a plan", ""), None),
    (Said(2, "", "tightfit: seq_len: 0 should be 1 or more\n"), None),
    (Said(2, "", "note: this\ntightfit: seq_len: 0 should be 1 or more\n"), None),
    (Said(2, "", "usage\n╭─ Error ───╮\n"), None),
    (Said(0, "", "", "Traceback ..."), "Traceback"),
    (Said(1, "", "something"), "status 1: something"),
    (Said(2, "", "Traceback (most recent call last):\n  x\n"), "Traceback"),
    (Said(0, "", "/a/b.py:3: UserWarning: odd\n"), "a warning: /a/b.py:3: UserWarning: odd"),
    (Said(2, "", "it failed"), "no message"),
    (Said(2, "", "tightfit: \n"), "an empty message"),
    (Said(2, "", "tightfit: " + "x" * 9000), "a message of 9000 characters"),
    (Said(2, "", "tightfit: " + "x\n" * 9), "in 9 lines"),
])
def test_what_is_wrong_with_what_a_command_said(said, wrong):
    found = harness.fault(said)
    assert found is None if wrong is None else wrong in found


def attempt(seed: int, folder: Path) -> str | None:
    (folder / "left behind").write_text("")
    if seed == 3:
        raise KeyError(seed)
    if seed == 5:
        os._exit(7)
    if seed == 6:
        time.sleep(60)
    return "odd" if seed == 8 else None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_seeds_that_fail_crash_or_hang_are_found_among_those_of_their_process():
    kind = harness.Kind(attempt, quick=1, chunk=2, seconds=1.0)
    found = dict(harness.run_seeds(kind, range(10)))
    assert [*found] == [*range(10)]
    wrong = {seed: text for seed, text in found.items() if text is not None}
    assert [*wrong] == [3, 5, 6, 8]
    assert "KeyError: 3" in wrong[3]
    assert wrong[5] == "ended with status 7"
    assert "took more than" in wrong[6]
    assert wrong[8] == "odd"

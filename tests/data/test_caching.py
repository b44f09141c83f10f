"""What a cache keeps of processes that were killed: nothing."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

from tightfit.data.caching import cached

FORK = multiprocessing.get_context("fork")


def fill(folder: Path) -> None:
    (folder / "part").write_text("whole")


def slowly(folder: Path) -> None:
    (folder / "part").write_text("half")
    time.sleep(60)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read(folder: Path) -> str:
    return (folder / "part").read_text()


def test_what_a_killed_process_left_goes_and_what_another_fills_stays(tmp_path: Path) -> None:
    killed, working = (FORK.Process(target=cached, args=(tmp_path / name, slowly, read)) for name in ("one", "two"))
    try:
        for process in (killed, working):
            process.start()
        while len(list(tmp_path.glob(".*/*/part"))) < 2:
            time.sleep(0.01)
        killed.kill()
        killed.join()
        assert cached(tmp_path / "three", fill, read) == "whole"
        assert [f"-{working.pid}-" in name for name in names(tmp_path)] == [True, True, False]
    finally:
        working.kill()
        working.join()
    assert cached(tmp_path / "one", fill, read) == "whole"
    assert names(tmp_path) == ["one", "three"]

"""Files that are whole or not there, whatever lies where they go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tightfit.files import write_atomically


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "real"
    link.symlink_to(real)
    write_atomically(link, "text")
    assert link.is_symlink()
    assert real.read_text() == "text"


def test_links_that_go_round_are_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("link")
    write_atomically(link, "text")
    assert link.read_text() == "text"


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(OSError, match="it is no file"):
            write_atomically(path, "text")
    assert pipe.is_fifo()
    assert [*tmp_path.iterdir()] == [pipe]

"""Files that are whole or not there, whatever lies where they go."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from tightfit.errors import CheckpointError
from tightfit.files import (
    WRITING,
    final_path,
    remove_unfinished,
    replacing_folder,
    system_errors,
    unfinished_folder,
    write_atomically,
)
from tightfit.system import expanded


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


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    model = tmp_path / "model"
    for name in ("first", "second"):
        with replacing_folder(model) as writing:
            assert final_path(writing / "base" / "file") == model / "base" / "file"
            (writing / "base").mkdir()
            (writing / "base" / name).write_text(name)
            assert contents(model) == ({} if name == "first" else {"base/first": "first"})
        assert contents(tmp_path) == {f"model/base/{name}": name}


def write_cut(model: Path) -> None:
    with replacing_folder(model) as writing:
        (writing / "new").write_text("cut")
        raise SafetensorError("I/O error: No space left on device (os error 28)")


def test_a_folder_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    model = tmp_path / "model"
    for before in ({}, {"old": "whole"}):
        for name, text in before.items():
            model.mkdir()
            (model / name).write_text(text)
        with pytest.raises(OSError, match="model") as found:
            write_cut(model)
        assert found.value.errno == errno.ENOSPC
        assert [path.name for path in tmp_path.iterdir()] == (["model"] if before else [])
        assert contents(model) == before


def test_a_folder_that_a_kill_left_aside_has_its_name_again(tmp_path: Path) -> None:
    aside, cut = tmp_path / f".model.before{WRITING}", tmp_path / f".model.1{WRITING}"
    for folder in (aside, cut):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    remove_unfinished(tmp_path / "model")
    assert contents(tmp_path) == {"model/file": aside.name}


def test_what_a_killed_process_of_the_same_number_left_unfinished_goes(tmp_path: Path) -> None:
    left = tmp_path / f".made-{os.getpid()}-7-ab"
    left.mkdir()
    left.with_suffix(".lock").touch()
    with unfinished_folder(tmp_path, "made") as own:
        assert not left.exists()
        with unfinished_folder(tmp_path, "made"):
            assert own.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_another_process_takes_or_removes_first_is_made_anew(tmp_path: Path, monkeypatch) -> None:
    taken: list[str] = []

    def lock(file: Any) -> None:
        taken.append(file.name)
        if len(taken) == 1:
            raise BlockingIOError
        if len(taken) == 2:
            Path(file.name).unlink()

    monkeypatch.setattr("tightfit.files.lock_file", lock)
    with unfinished_folder(tmp_path, "made") as own:
        assert own.is_dir()
        assert [Path(name).exists() for name in taken] == [True, False, True]
        assert own.with_suffix(".lock") == Path(taken[-1])


def test_a_file_where_a_folder_goes_stays(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("text")
    with pytest.raises(OSError, match="it is no folder"), replacing_folder(tmp_path / "model"):
        pytest.fail("nothing is to be written")
    assert contents(tmp_path) == {"model": "text"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_disk_under_a_tokenizer_is_the_systems_error() -> None:
    from tokenizers import Tokenizer, models

    with pytest.raises(OSError, match="No space left") as found, system_errors():
        Tokenizer(models.BPE()).save("/dev/full")
    assert found.value.errno == errno.ENOSPC


@pytest.mark.parametrize(("raised", "number"), [
    (SafetensorError('IoError(Os { code: 13, kind: PermissionDenied, message: "Permission denied" })'), errno.EACCES),
    (SafetensorError("header too large"), None),
    (CheckpointError("cannot be written: No space left on device (os error 28)"), None),
])  # fmt: skip
def test_only_the_systems_errors_are_made_so(raised: Exception, number: int | None) -> None:
    with pytest.raises(type(raised) if number is None else OSError) as found, system_errors():
        raise raised
    assert getattr(found.value, "errno", None) == number


def test_caches_lie_where_the_system_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, expected in ((str(tmp_path / "mine"), "mine"), ("not/whole", ".cache"), ("", ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert expanded("~/.cache/tightfit") == tmp_path / expected / "tightfit"
        assert expanded("~/other/.cache") == tmp_path / "other/.cache"

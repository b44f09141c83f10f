"""A checkpoint is whole or not there."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.data.helpers import FACTS, recipe, texts, write_jsonl
from tightfit.data import GlobalBatchLoader, prepare
from tightfit.errors import CheckpointError
from tightfit.files import WRITING
from tightfit.training import checkpoints


def write(content: bytes):
    def fill(folder: Path):
        (folder / "weights.safetensors").write_bytes(content)
        return {"note": "from the backend"}

    return fill


def test_what_is_saved_is_read(tmp_path):
    folder = checkpoints.save(tmp_path, 7, write(b"abc"), {"tokens": 5})
    found = checkpoints.read(folder)
    assert (found.step, found.meta, found.loop) == (7, {"note": "from the backend"}, {"tokens": 5})


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "manifest", "manifest type", "meta", "value"])
def test_a_broken_newest_falls_back_saying_so(tmp_path, harm):
    checkpoints.save(tmp_path, 1, write(b"first"), {})
    newest = checkpoints.save(tmp_path, 2, write(b"second"), {})
    weights, manifest = newest / "weights.safetensors", newest / checkpoints.MANIFEST
    {
        "flip": lambda: weights.write_bytes(b"secOnd"),
        "cut": lambda: weights.write_bytes(b"sec"),
        "remove": weights.unlink,
        "manifest": lambda: manifest.write_text('{"step": 2'),
        "manifest type": lambda: manifest.write_text("[]"),
        "meta": lambda: manifest.write_text(re.sub(r'"meta": {.*?}', '"meta": null', manifest.read_text())),
        "value": lambda: manifest.write_text(manifest.read_text().replace("backend", "Backend")),
    }[harm]()
    said: list[str] = []
    found = checkpoints.newest(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    assert "step-00000002 is broken" in said[0]
    assert [path.name for path in checkpoints.folders(tmp_path)] == ["step-00000001"]
    assert (tmp_path / "broken-step-00000002").exists()


@pytest.mark.parametrize("name", ["step-best", "step-old", "step-00000001.bak", "step-1"])
def test_a_copy_by_another_name_is_neither_the_newest_nor_removed(tmp_path, name):
    checkpoints.save(tmp_path, 1, write(b"first"), {})
    shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    checkpoints.save(tmp_path, 2, write(b"second"), {})
    checkpoints.prune(tmp_path, 1)
    found = checkpoints.newest(tmp_path, pytest.fail)
    assert found is not None
    assert (found.step, checkpoints.steps(tmp_path)) == (2, [2])
    assert (tmp_path / name / checkpoints.MANIFEST).exists()


def test_a_checkpoint_by_the_name_of_another_step_is_put_aside(tmp_path):
    checkpoints.save(tmp_path, 1, write(b"first"), {})
    checkpoints.save(tmp_path, 2, write(b"second"), {}).rename(tmp_path / "step-00000009")
    said: list[str] = []
    found = checkpoints.newest(tmp_path, said.append)
    assert found is not None
    assert (found.step, checkpoints.steps(tmp_path)) == (1, [1])
    assert "it is of step 2, and was renamed" in said[0]


def test_all_broken_is_an_error_and_none_is_none(tmp_path):
    assert checkpoints.newest(tmp_path, pytest.fail) is None
    folder = checkpoints.save(tmp_path, 1, write(b"first"), {})
    (folder / checkpoints.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="every checkpoint"):
        checkpoints.newest(tmp_path, lambda text: None)


@pytest.mark.parametrize(("number", "advice"), [
    (errno.ENOSPC, "No space left on device; older checkpoints are untouched; free some space, or write output_dir="),
    (errno.EFBIG, "File too large; older checkpoints are untouched; allow larger files by: ulimit -f unlimited"),
    (errno.EROFS, "Read-only file system; older checkpoints are untouched; write output_dir="),
])
def test_a_full_disk_leaves_the_older_ones_and_nothing_half_written(tmp_path, number, advice):
    checkpoints.save(tmp_path, 1, write(b"first"), {})

    def full(folder: Path):
        (folder / "weights.safetensors").write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    with pytest.raises(CheckpointError, match=f"step 2 .*{advice}"):
        checkpoints.save(tmp_path, 2, full, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10, 100):
        checkpoints.save(tmp_path, step, write(b"x"), {})
    (tmp_path / f".step-00000101.1{WRITING}").mkdir()
    checkpoints.prune(tmp_path, None)
    assert len([*tmp_path.iterdir()]) == 4
    checkpoints.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "seq2seq"])
def test_rows_padded_to_other_lengths_are_the_same_data(tmp_path, task):
    rows = [{"text": text, "target": target} for text, target in zip(texts(20), texts(20, seed=1), strict=True)]
    found = []
    for start in (0, 1):
        source = str(write_jsonl(tmp_path / f"{start}.jsonl", rows[start:]))
        values = recipe(tmp_path, task=task, data={"source": source, "packing": False}, batch_size=6)
        samples = prepare(values, FACTS).train
        loaders = [GlobalBatchLoader(samples, values.override(micro_batch_size=size)) for size in (1, 2, 5, 6)]
        found.append({tuple(checkpoints.data_signature(loader)) for loader in loaders})
    assert [len(signatures) for signatures in found] == [1, 1]
    assert found[0] != found[1]

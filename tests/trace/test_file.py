"""Trace files: what is written is what is read, and bad files are named."""

from __future__ import annotations

import errno
import gzip
import json
from dataclasses import replace

import pytest

from tests.profiling.profiled import hostile, predicted, profile
from tightfit.errors import ReportError
from tightfit.files import replacing
from tightfit.trace import Allocation, Category, Op, OpClass, Phase, Place, Span, Stream, Trace
from tightfit.trace.file import BLOCK_SIZE, VERSION, load_trace, save_trace


def op(tick, seconds=1e-6, **changes):
    values = {"name": "aten.mm", "tick": tick, "phase": Phase.FORWARD, "op_class": OpClass.CONTRACTION,
              "seconds": seconds}
    return Op(**{**values, **changes})


def allocation(born, size, died=None):
    return Allocation(born=born, died=died, bytes=size, category=Category.ACTIVATIONS, category_since=born)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json.gz"


def lines(path):
    with gzip.open(path, "rt") as file:
        return file.read().splitlines()


def write(path, rows):
    with gzip.open(path, "wt") as file:
        file.writelines(row + "\n" for row in rows)


@pytest.mark.parametrize("make", [predicted, lambda: profile().measured, lambda: hostile().measured,
                                  lambda: Trace(origin="predicted")], ids=["predicted", "measured", "hostile", "empty"])
def test_what_is_written_is_what_is_read(path, make):
    trace = make()
    save_trace(trace, path)
    assert load_trace(path) == trace


def test_many_blocks(path):
    trace = Trace(origin="measured", ops=[op(i, seconds=None if i % 3 else i / 7) for i in range(2 * BLOCK_SIZE + 5)],
                  allocations=[allocation(i, i, None if i % 2 else i + 3) for i in range(BLOCK_SIZE + 1)],
                  spans=[Span(name="step 1", start=0, stop=9, step=1, times=2, seconds=0.5)])
    save_trace(trace, path)
    assert load_trace(path) == trace


def test_a_disk_that_is_full_is_said_by_the_files_name(path):
    save_trace(Trace(origin="measured", ops=[op(1)]), path)
    whole = path.read_bytes()

    def cut_off():
        with replacing(path) as temporary:
            temporary.write_bytes(whole[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as caught:
        cut_off()
    assert caught.value.filename == str(path)
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == whole


def test_a_write_that_fails_leaves_the_old_file(path):
    good = Trace(origin="measured", ops=[op(1)])
    save_trace(good, path)
    with pytest.raises(ValueError, match="JSON compliant"):
        save_trace(Trace(origin="measured", ops=[op(1, seconds=float("nan"))]), path)
    assert load_trace(path) == good
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"just text", gzip.compress(b"just text\n"), gzip.compress(b"[1]\n"),
                                     gzip.compress(b'{"format": "other"}\n'), gzip.compress(b"x" * 100)],
                         ids=["empty", "text", "packed text", "a list", "another format", "no lines"])  # not the time
def test_a_foreign_file_is_named(path, content):
    path.write_bytes(content)
    with pytest.raises(ReportError, match=r"trace\.json\.gz: .*(no trace of tightfit's|ends too early)"):
        load_trace(path)


def test_no_file_and_a_folder(path):
    with pytest.raises(ReportError, match="cannot be read"):
        load_trace(path)
    path.mkdir()
    with pytest.raises(ReportError, match="cannot be read"):
        load_trace(path)


def test_a_truncated_file_is_named_wherever_it_ends(path):
    save_trace(predicted(), path)
    whole, rows = path.read_bytes(), lines(path)
    for share in (0.1, 0.5, 0.9, 0.999):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ReportError, match=r"damaged .*ends too early"):
            load_trace(path)
    for count in range(1, len(rows)):
        write(path, rows[:count])
        with pytest.raises(ReportError, match="ends too early"):
            load_trace(path)
    middle = len(whole) // 2  # behind the header, without which it would be no trace of ours
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :])
    with pytest.raises(ReportError, match="damaged"):
        load_trace(path)


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_another_version_is_named(path, version):
    save_trace(Trace(origin="measured"), path)
    head, *rest = lines(path)
    write(path, [json.dumps({**json.loads(head), "version": version}), *rest])
    with pytest.raises(ReportError, match=f"version {version}.*update tightfit"):
        load_trace(path)


@pytest.mark.parametrize(("old", "new"), [
    ('"tick":1', '"tick":"1"'), ('"tick":1', '"tick":1.5'), ('"tick":1', '"tick":true'), ('"tick":1,', ""),
    ('"seconds":1e-06', '"seconds":NaN'), ('"seconds":1e-06', '"seconds":1e999'), ('"seconds":1e-06', '"seconds":-1'),
    ('"seconds":1e-06', '"seconds":"x"'), ('"forward"', '"sideways"'), ('"aten.mm"', "7"), ('"flops":5', '"flops":-5'),
    ('"flops":5', f'"flops":{10**30}'), ('"ops":2', '"ops":3'), ('{"ops"', '{"opz"'), ('"measured"', '"guessed"'),
    ('"notes":[]', '"notes":3'), ('{"name"', '["name"'),
])
def test_a_damaged_value_is_named(path, old, new):
    save_trace(Trace(origin="measured", ops=[op(1, flops=5), op(2)]), path)
    text = "\n".join(lines(path))
    assert old in text
    write(path, text.replace(old, new, 1).split("\n"))
    with pytest.raises(ReportError, match="damaged"):
        load_trace(path)


def test_places_streams_and_what_waits_are_kept(path):
    held = replace(allocation(1, 8), place=Place.HOST, pinned=True)
    trace = Trace(origin="predicted", allocations=[held, allocation(2, 4)],
                  ops=[op(1, stream=Stream.COPY_OUT), op(2, after=(1,)), op(3)])
    save_trace(trace, path)
    assert load_trace(path) == trace

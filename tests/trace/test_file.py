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
from tightfit.trace.file import TRACE_FILE


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
    TRACE_FILE.save(trace, path)
    assert TRACE_FILE.load(path) == trace


def test_a_long_trace(path):
    trace = Trace(origin="measured", ops=[op(i, seconds=None if i % 3 else i / 7) for i in range(9000)],
                  allocations=[allocation(i, i, None if i % 2 else i + 3) for i in range(5000)],
                  spans=[Span(name="step 1", start=0, stop=9, step=1, times=2, seconds=0.5)])
    TRACE_FILE.save(trace, path)
    assert TRACE_FILE.load(path) == trace


def test_a_disk_that_is_full_is_said_by_the_files_name(path):
    TRACE_FILE.save(Trace(origin="measured", ops=[op(1)]), path)
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


def test_seconds_that_are_no_number_are_not_known(path):
    TRACE_FILE.save(Trace(origin="measured", ops=[op(1, seconds=float("nan"))]), path)
    assert TRACE_FILE.load(path).ops[0].seconds is None


@pytest.mark.parametrize("content", [b"", b"just text", gzip.compress(b"just text\n"), gzip.compress(b"[1]\n"),
                                     gzip.compress(b'{"format": "other"}\n'), gzip.compress(b"x" * 100)],
                         ids=["empty", "text", "packed text", "a list", "another format", "no lines"])  # not the time
def test_a_foreign_file_is_named(path, content):
    path.write_bytes(content)
    with pytest.raises(ReportError, match=r"trace\.json\.gz: .*(no trace of tightfit's|ends too early)"):
        TRACE_FILE.load(path)


def test_no_file_and_a_folder(path):
    with pytest.raises(ReportError, match="cannot be read"):
        TRACE_FILE.load(path)
    path.mkdir()
    with pytest.raises(ReportError, match="cannot be read"):
        TRACE_FILE.load(path)


def test_a_truncated_file_is_named_wherever_it_ends(path):
    TRACE_FILE.save(predicted(), path)
    whole, head = path.read_bytes(), lines(path)[:1]
    for share in (0.1, 0.5, 0.9, 0.999):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ReportError, match=r"damaged .*ends too early"):
            TRACE_FILE.load(path)
    write(path, head)
    with pytest.raises(ReportError, match="damaged"):
        TRACE_FILE.load(path)
    middle = len(whole) // 2  # behind the first line, without which it would be no trace of ours
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :])
    with pytest.raises(ReportError, match="damaged"):
        TRACE_FILE.load(path)


@pytest.mark.parametrize("version", [TRACE_FILE.version - 1, TRACE_FILE.version + 1])
def test_another_version_is_named(path, version):
    TRACE_FILE.save(Trace(origin="measured"), path)
    head, *rest = lines(path)
    write(path, [json.dumps({**json.loads(head), "version": version}), *rest])
    with pytest.raises(ReportError, match=f"version {version}.*update tightfit"):
        TRACE_FILE.load(path)


@pytest.mark.parametrize(("old", "new"), [
    ('"tick":1', '"tick":"1"'), ('"tick":1', '"tick":1.5'), ('"tick":1', '"tick":true'), ('"tick":1,', ""),
    ('"seconds":0.5', '"seconds":NaN'), ('"seconds":0.5', '"seconds":1e999'), ('"seconds":0.5', '"seconds":-1'),
    ('"seconds":0.5', '"seconds":"x"'), ('"forward"', '"sideways"'), ('"aten.mm"', "7"), ('"flops":5', '"flops":-5'),
    ('"flops":5', f'"flops":{10**30}'), ('"measured"', '"guessed"'), ('"notes":["so"]', '"notes":3'),
    ('{"name"', '["name"'),
])
def test_a_damaged_value_is_named(path, old, new):
    TRACE_FILE.save(Trace(origin="measured", ops=[op(1, seconds=0.5, flops=5), op(2)], notes=["so"]), path)
    text = "\n".join(lines(path))
    assert old in text
    write(path, text.replace(old, new, 1).split("\n"))
    with pytest.raises(ReportError, match="damaged"):
        TRACE_FILE.load(path)


def test_places_streams_and_what_waits_are_kept(path):
    held = replace(allocation(1, 8), place=Place.HOST, pinned=True)
    trace = Trace(origin="predicted", allocations=[held, allocation(2, 4)],
                  ops=[op(1, stream=Stream.COPY_OUT), op(2, after=(1,)), op(3)])
    TRACE_FILE.save(trace, path)
    assert TRACE_FILE.load(path) == trace

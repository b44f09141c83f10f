"""Measuring the disk that runs are written to, with a file that is removed again."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from tightfit.doctor.readings import Disk

BYTES = 256 << 20
CHUNK = 8 << 20


def read_disk(folder: Path, measure: bool = True, most: int = BYTES) -> Disk:
    """Size and free space of the disk that `folder` is on, and its speeds.

    measure: whether to write and read a file there: at most `most` bytes, and at most a sixteenth of what is free.
    The write counts until the disk says that it has the data. For the read the system is asked to forget the file
    first; where it cannot be asked, no reading speed is given.
    """
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Disk(folder=str(folder), error=error.strerror or str(error))
    room = min(most, usage.free // 16) // CHUNK * CHUNK
    try:
        write, read = _speeds(folder, room if measure else 0)
    except OSError as error:
        return Disk(folder=str(folder), total=usage.total, free=usage.free, error=error.strerror or str(error))
    measured = room if write is not None else None
    return Disk(folder=str(folder), total=usage.total, free=usage.free, measured=measured, write=write, read=read)


def _speeds(folder: Path, size: int) -> tuple[float | None, float | None]:
    """Bytes a second of writing and reading; None for 0 bytes. Raises OSError where nothing can be written."""
    chunk = os.urandom(CHUNK)  # some disks compress, and would find zeros easy
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # has no name on Linux: gone even after a kill
        if not size:
            return None, None
        began = time.perf_counter()
        for _ in range(size // CHUNK):
            _write(file.fileno(), chunk)
        os.fsync(file.fileno())
        write = size / (time.perf_counter() - began)
        return write, _reading_speed(file.fileno(), size)


def _write(descriptor: int, chunk: bytes) -> None:
    left = memoryview(chunk)
    while left:  # a nearly full disk takes a part first, and fails at the next
        left = left[os.write(descriptor, left):]


def _reading_speed(descriptor: int, size: int) -> float | None:
    if not hasattr(os, "posix_fadvise"):
        return None
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    began = time.perf_counter()
    while os.read(descriptor, CHUNK):
        pass
    return size / (time.perf_counter() - began)

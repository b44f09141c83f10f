"""The machine as this process may use it: versions of libraries, cores and memory within containers' limits."""

from __future__ import annotations

import math
import mmap
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO, Any

import psutil

try:
    import fcntl
    import resource
except ImportError:  # on Windows
    POSIX = False
else:
    POSIX = True

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK") if hasattr(signal, name))
"""Signals that ask a process to end, as far as the system has them."""
KILLED_STATUS = -9
"""Exit status of a process that the system, or SIGKILL, ended."""


def expanded(path: str | Path) -> Path:
    """A path with `~` for the user's home written out; for `~/.cache` XDG_CACHE_HOME, where that is a whole path."""
    path, caches = Path(path), Path(os.environ.get("XDG_CACHE_HOME", ""))
    usual = Path("~/.cache")
    return caches / path.relative_to(usual) if caches.is_absolute() and usual in path.parents else path.expanduser()


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let every signal of SIGNALS raise KeyboardInterrupt, as Ctrl-C does. For the main thread."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def version_of(library: str) -> str | None:
    """The library's version; None where it is not installed, such as tightfit itself where a checkout runs."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(library)
    return None


def installed(libraries: Iterable[str]) -> dict[str, str]:
    """The version of each library that is installed, by its name."""
    return {name: found for name in libraries if (found := version_of(name)) is not None}


CPU_INFO = Path("/proc/cpuinfo")
UNLIMITED = 1 << 60
"""A limit at or above this is none: the old control groups write a huge number."""
CONTROL_GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_limits() -> Iterator[tuple[int, int]]:
    """The limit of memory of each control group that this process is in, from its own to the outermost, and what the
    group uses now."""
    for controller, limit, used in (("", "memory.max", "memory.current"),
                                    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")):
        for folder in _groups(controller):
            words = _words(folder / limit)
            if words and words[0].isdecimal() and int(words[0]) < UNLIMITED:
                now = _words(folder / used)
                yield int(words[0]), int(now[0]) if now and now[0].isdecimal() else 0


def cores() -> int:
    """Processor cores that this process may use, rounded up: by its affinity and its control groups."""
    try:
        own = len(os.sched_getaffinity(0))
    except AttributeError:  # no affinity on this system
        own = os.cpu_count() or 1
    return max(1, min([own, *map(math.ceil, _core_limits())]))


@cache
def multiplies_half() -> bool:
    """Whether PyTorch multiplies numbers of 16 bits on this processor as fast as it should: it wants AVX-512, or Arm's
    bf16. A system that does not say is taken to have them."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", read_text(CPU_INFO), re.MULTILINE)
    return found is None or not {"avx512bw", "bf16"}.isdisjoint(found[1].split())


def _core_limits() -> Iterator[float]:
    """The cores whose time each control group that this process is in may take, from its own to the outermost."""
    for folder in _groups(""):
        words = _words(folder / "cpu.max")
        if len(words) == 2 and words[0].isdecimal():
            yield float(words[0]) / float(words[1])
    for folder in _groups("cpu"):
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and quota[0].isdecimal():
            yield float(quota[0]) / float((period or ["100000"])[0])


def _groups(controller: str) -> Iterator[PurePosixPath]:
    """The folders of this process's group and of those around it, of a controller; of version 2, which has one folder
    for all controllers, where it is empty. What a container calls its group may not be there: then it sees only the
    outermost, which is its own."""
    own = PurePosixPath()
    for line in read_text(OWN_GROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = PurePosixPath(path.lstrip("/"))
    for group in (own, *own.parents):
        yield controller / group


def _words(name: PurePosixPath) -> list[str]:
    """The words of one of the control groups' files; none where there is no such file."""
    return read_text(CONTROL_GROUPS / name).split()


def read_text(path: Path) -> str:
    """The text of one of the system's files; empty where it cannot be read."""
    with suppress(OSError):
        return path.read_text("utf-8", "replace")
    return ""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes, within every limit on this process. total: of the machine. available: now. swap: what may be moved to disk
    besides."""

    total: int
    available: int
    swap: int = 0


def pinned_size(size: int) -> int:
    """Bytes that PyTorch page-locks for `size` bytes, at least 1: the next power of two
    (aten/src/ATen/core/CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length()


def whole_pages(size: int) -> int:
    """Bytes of the system's pages that hold `size` bytes."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def host_memory() -> HostMemory:
    """The host's memory now."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory().free
    limits = [*memory_limits(), *process_limits()]
    least = min((limit for limit, _ in limits), default=memory.total + swap)
    left = [max(limit - used, 0) for limit, used in limits]
    return HostMemory(total=min(memory.total, least), available=min([memory.available, *left]),
                      swap=min(swap, max(least - memory.total, 0)))


def process_limits() -> Iterator[tuple[int, int]]:
    """The limits on this process's own memory, such as `ulimit -v` sets, and what it uses now."""
    if not POSIX:
        return
    used = psutil.Process().memory_info()
    for which, now in ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", 0))):
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY:
            yield limit, now


def peak_process_memory() -> int:
    """The most bytes of the machine's memory that this process has had at once."""
    if not POSIX:
        return int(psutil.Process().memory_info().peak_wset)  # type: ignore[attr-defined]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def lock_file(file: IO[Any]) -> None:
    """Lock an open file for this process alone, without waiting; the lock falls with the process, and is not inherited.
    Raises OSError, BlockingIOError where another process holds it."""
    if POSIX:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike one of flock's, not a forked process's as well
        return
    import msvcrt

    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except PermissionError as error:
        raise BlockingIOError(*error.args) from None


ORPHANED_STATUS = 3
"""The exit status of a process whose parent is gone."""


def end_with(parent: int) -> None:
    """Let this process end when another one ends: killed, that one can end nobody else, and a process that goes on
    would hold a card or a run's folder."""

    def watch() -> None:
        while psutil.pid_exists(parent):
            time.sleep(1)
        os._exit(ORPHANED_STATUS)

    threading.Thread(target=watch, daemon=True).start()

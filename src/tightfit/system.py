"""The machine as this process may use it: versions of libraries, cores and memory within containers' limits, and
NVIDIA's management library (NVML).

    with nvml_session() as nvml:
        for handle in nvml.cards():
            nvml.ask("nvmlDeviceGetName", handle)

Asking NVML makes no CUDA context, so that it takes no memory of the card and works while another process fills it. What
a card, a driver or an older binding does not know reads as None.
"""

from __future__ import annotations

import importlib
import math
import mmap
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

import psutil

try:
    import fcntl
    import resource
except ImportError:  # on Windows
    POSIX = False
else:
    POSIX = True

STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
"""Signals that ask a process to end, as far as the system has them."""
KILLED = -9
"""Exit status of a process that the system, or SIGKILL, ended."""


def version_of(library: str) -> str | None:
    """The library's version; None where it is not installed, such as tightfit itself where a checkout runs."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def installed(libraries: Iterable[str]) -> dict[str, str]:
    """The version of each library that is installed, by its name."""
    return {name: found for name in libraries if (found := version_of(name)) is not None}


UNLIMITED = 1 << 60
"""A limit at or above this is none: the old control groups write a huge number."""
GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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
    return read_text(GROUPS / name).split()


def read_text(path: Path) -> str:
    """The text of one of the system's files; empty where it cannot be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes, within every limit on this process. total: of the machine. available: now. swap: what may be moved to disk
    besides. pinnable: how many may be page-locked at once; None for all."""

    total: int
    available: int
    swap: int = 0
    pinnable: int | None = None


def pinned_size(size: int) -> int:
    """Bytes that PyTorch page-locks for `size` bytes, at least 1: the next power of two
    (aten/src/ATen/core/CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length()


def whole_pages(size: int) -> int:
    """Bytes of the system's pages that hold `size` bytes."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def host_memory() -> HostMemory:
    """The host's memory now. Windows lets its Linux page-lock half of the machine's."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory().free
    limits = [*memory_limits(), *process_limits()]
    least = min((limit for limit, _ in limits), default=memory.total + swap)
    left = [max(limit - used, 0) for limit, used in limits]
    return HostMemory(total=min(memory.total, least), available=min([memory.available, *left]),
                      swap=min(swap, max(least - memory.total, 0)),
                      pinnable=memory.total // 2 if "microsoft" in platform.release().lower() else None)


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


Missing = Literal["no-binding", "no-library", "no-driver", "mismatch", "no-permission", "failed"]
"""Why NVML cannot be asked: the binding is not installed; the driver's library is not there; the driver is not loaded;
library and loaded driver differ, as after an update without a restart; the devices may not be opened; anything else."""

_MISSING: dict[str, Missing] = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": "no-library",
    "NVML_ERROR_DRIVER_NOT_LOADED": "no-driver",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "mismatch",
    "NVML_ERROR_NO_PERMISSION": "no-permission",
}
NOT_KNOWN = (1 << 64) - 1
"""The reading of a counter of 64 bits that has no value."""


class NoNvml(Exception):
    """NVML cannot be asked here. reason: which of the known cases it is."""

    def __init__(self, reason: Missing, said: str) -> None:
        super().__init__(reason, said)
        self.reason, self.said = reason, said


@dataclass(frozen=True)
class Lost:
    """A card that is there and cannot be asked, with what the driver said."""

    said: str


class Nvml:
    """An open session; handles are the binding's own."""

    def __init__(self, binding: Any) -> None:
        self._binding = binding

    def ask(self, function: str, *arguments: Any) -> Any:
        """The function's answer as text or number; None where there is none."""
        try:
            answer = getattr(self._binding, function)(*arguments)
        except (AttributeError, self._binding.NVMLError):
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def constant(self, name: str, default: int) -> int:
        """The binding's value of a constant, `default` where it does not have it."""
        return int(getattr(self._binding, name, default))

    def driver(self) -> str | None:
        """The loaded driver's version, such as `580.65.06`."""
        version = self.ask("nvmlSystemGetDriverVersion")
        return version if isinstance(version, str) else None

    def cards(self) -> list[Any]:
        """A handle for each card in the driver's order; `Lost` in the place of one that does not answer."""
        found: list[Any] = []
        for index in range(self.ask("nvmlDeviceGetCount") or 0):
            try:
                found.append(self._binding.nvmlDeviceGetHandleByIndex(index))
            except self._binding.NVMLError as error:
                found.append(Lost(str(error)))
        return found

    def memory(self, handle: Any) -> tuple[int, int, int | None] | None:
        """Bytes of the card: total, in use, kept by the driver. In use excludes what the driver keeps, where the driver
        counts that separately."""
        version = self.constant("nvmlMemory_v2", 0x02000028)
        if (both := self.ask("nvmlDeviceGetMemoryInfo", handle, version)) is not None:
            return int(both.total), int(both.used), int(both.reserved)
        if (old := self.ask("nvmlDeviceGetMemoryInfo", handle)) is not None:
            return int(old.total), int(old.used), None
        return None

    def processes(self, handle: Any) -> dict[int, int | None] | None:
        """Bytes that each process has on the card, by its id; None bytes where the driver does not say, as in some
        containers and on Windows."""
        lists = [self.ask(f"nvmlDeviceGet{kind}RunningProcesses", handle) for kind in ("Compute", "Graphics")]
        if lists == [None, None]:
            return None
        found: dict[int, int | None] = {}
        for process in (p for some in lists for p in some or ()):
            used = process.usedGpuMemory
            found[int(process.pid)] = None if used is None or used == NOT_KNOWN else int(used)
        return found


@contextmanager
def nvml_session() -> Iterator[Nvml]:
    """NVML, until the end of the block. Raises NoNvml where it cannot be asked."""
    try:
        binding = importlib.import_module("pynvml")
    except ImportError as error:
        raise NoNvml("no-binding", str(error)) from None
    try:
        binding.nvmlInit()
    except binding.NVMLError as error:
        known = {getattr(binding, name, None): reason for name, reason in _MISSING.items()}
        raise NoNvml(known.get(error.value, "failed"), str(error)) from None
    try:
        yield Nvml(binding)
    finally:
        Nvml(binding).ask("nvmlShutdown")


def process_bytes(uuid: str) -> tuple[int | None, int | None]:
    """Bytes that this process, and that others have on the card of that UUID (`GPU-...`), as the driver counts them:
    CUDA contexts, loaded kernels and libraries' own memory included. None where it cannot be said, as in a container
    that hides process ids."""
    try:
        with nvml_session() as nvml:
            handle = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
            found = None if handle is None else nvml.processes(handle)
    except NoNvml:
        found = None
    if found is None or os.getpid() not in found:
        return None, None
    own = found.pop(os.getpid())
    others = [used for used in found.values() if used is not None]
    return own, sum(others) if len(others) == len(found) else None


def driver_version() -> str | None:
    """The loaded driver's version; None where there is none, or it does not say."""
    try:
        with nvml_session() as nvml:
            return nvml.driver()
    except NoNvml:
        return None


ORPHANED = 3
"""The exit status of a process whose parent is gone."""


def end_with(parent: int) -> None:
    """Let this process end when another one ends: killed, that one can end nobody else, and a process that goes on
    would hold a card or a run's folder."""

    def watch() -> None:
        while psutil.pid_exists(parent):
            time.sleep(1)
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True).start()

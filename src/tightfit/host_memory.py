"""The host's memory, as this process may use it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

UNLIMITED = 1 << 60
"""A limit at or above this is none: the old control groups write a huge number."""
GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes, within every limit on this process. total: of the machine. available: now. swap: what may be moved to disk
    besides."""

    total: int
    available: int
    swap: int = 0


def host_memory() -> HostMemory:
    """The host's memory now."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory().free
    limits = [*group_limits(), *process_limits()]
    least = min((limit for limit, _ in limits), default=memory.total + swap)
    left = [max(limit - used, 0) for limit, used in limits]
    return HostMemory(total=min(memory.total, least), available=min([memory.available, *left]),
                      swap=min(swap, max(least - memory.total, 0)))


def group_limits() -> Iterator[tuple[int, int]]:
    """The limit of memory of each control group that this process is in, from its own to the outermost, and what the
    group uses now."""
    for controller, limit, used in (("", "memory.max", "memory.current"),
                                    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")):
        for folder in _groups(controller):
            words = group_words(str(folder / limit))
            if words and words[0].isdecimal() and int(words[0]) < UNLIMITED:
                now = group_words(str(folder / used))
                yield int(words[0]), int(now[0]) if now and now[0].isdecimal() else 0


def _groups(controller: str) -> Iterator[PurePosixPath]:
    """The folders of this process's group and of those around it, of a controller; of version 2, which has one folder
    for all controllers, where it is empty. What a container calls its group may not be there: then it sees only the
    outermost, which is its own."""
    own = PurePosixPath()
    for line in _text(OWN_GROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = PurePosixPath(path.lstrip("/"))
    for group in (own, *own.parents):
        yield controller / group


def process_limits() -> Iterator[tuple[int, int]]:
    """The limits on this process's own memory, such as `ulimit -v` sets, and what it uses now."""
    used = psutil.Process().memory_info()
    for which, now in ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", 0))):
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY:
            yield limit, now


def group_words(name: str) -> list[str]:
    """The words of one of the control groups' files; none where there is no such file."""
    return _text(GROUPS / name).split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

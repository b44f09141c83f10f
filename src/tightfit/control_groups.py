"""What Linux's control groups, and with them containers, leave this process: memory and processor cores."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

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
    for line in _text(OWN_GROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = PurePosixPath(path.lstrip("/"))
    for group in (own, *own.parents):
        yield controller / group


def _words(name: PurePosixPath) -> list[str]:
    """The words of one of the control groups' files; none where there is no such file."""
    return _text(GROUPS / name).split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

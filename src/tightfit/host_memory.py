"""The host's memory, as this process may use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

UNLIMITED = 1 << 60
"""A limit at or above this is none: the old control groups write a huge number."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes. total, available: within the control group's limit. swap: what may be moved to disk besides."""

    total: int
    available: int
    swap: int = 0


def host_memory() -> HostMemory:
    """The host's memory now."""
    memory = psutil.virtual_memory()
    limit, used = group_limit()
    if limit is None:
        return HostMemory(total=memory.total, available=memory.available, swap=psutil.swap_memory().free)
    return HostMemory(total=min(memory.total, limit), available=min(memory.available, max(limit - used, 0)))


def group_limit() -> tuple[int | None, int]:
    """The control group's limit of memory, and what it uses now. None where there is no limit."""
    for limit, used in (("memory.max", "memory.current"),
                        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        words = group_words(limit)
        if words and words[0].isdecimal() and int(words[0]) < UNLIMITED:
            now = group_words(used)
            return int(words[0]), int(now[0]) if now and now[0].isdecimal() else 0
    return None, 0


def group_words(name: str) -> list[str]:
    """The words of one of the control group's files; none where there is no such file."""
    try:
        return (Path("/sys/fs/cgroup") / name).read_text().split()
    except OSError:
        return []

"""The host's memory, as this process may use it."""

from __future__ import annotations

import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from tightfit.control_groups import memory_limits


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes, within every limit on this process. total: of the machine. available: now. swap: what may be moved to disk
    besides. pinnable: how many may be page-locked at once; None for all."""

    total: int
    available: int
    swap: int = 0
    pinnable: int | None = None


def host_memory() -> HostMemory:
    """The host's memory now. Windows lets its Linux page-lock half of the machine's."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory().free
    limits = [*memory_limits(), *process_limits()]
    least = min((limit for limit, _ in limits), default=memory.total + swap)
    left = [max(limit - used, 0) for limit, used in limits]
    return HostMemory(total=min(memory.total, least), available=min([memory.available, *left]),
                      swap=min(swap, max(least - memory.total, 0)),
                      pinnable=memory.total // 2 if "microsoft" in platform.release().lower() else None)


def pinned_size(size: int) -> int:
    """Bytes that PyTorch page-locks for `size` bytes, at least 1: the next power of two
    (aten/src/ATen/core/CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length()


def process_limits() -> Iterator[tuple[int, int]]:
    """The limits on this process's own memory, such as `ulimit -v` sets, and what it uses now."""
    used = psutil.Process().memory_info()
    for which, now in ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", 0))):
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY:
            yield limit, now

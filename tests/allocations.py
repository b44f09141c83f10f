"""Bytes that the CPU's allocator gives out, by torch's own profiler."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def allocated(work: Callable[[], object]) -> list[int]:
    """Bytes held beyond what was there before, at first and after each allocation and release of a call, whose result
    stays."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    del kept
    return list(accumulate((e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())), initial=0))

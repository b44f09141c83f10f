"""Time that a process has spent compiling, as Dynamo records it."""

from __future__ import annotations

import sys

OUTERMOST = ("_compile.compile_inner", "backward._backward_impl")
"""Dynamo's timed sections that contain all others: of a forward pass's compilation, and of a backward pass's."""


def compile_seconds() -> float:
    """Seconds that Dynamo and its backends have spent compiling in this process; 0 where this torch does not say."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:  # nothing was compiled, and loading Dynamo takes seconds
        return 0.0
    times: dict[str, list[float]] = getattr(dynamo, "compilation_time_metrics", {})  # a private record
    return sum(sum(times.get(name, ())) for name in OUTERMOST)

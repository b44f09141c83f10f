"""Seconds of a call: on the CPU by its clock, on a CUDA device inside a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.backends.pytorch.follow.op_costs import Cost, cost

Call = Callable[[], Any]

ROUND, ROUNDS = {"cpu": 1e-3, "cuda": 2e-3}, 5
"""Seconds of a round, at least one call; and rounds, `FEW` of those that take longer."""
FEW = 2
GRAPHED = 50
"""Calls in one CUDA graph, at most."""


def seconds(call: Call, device: torch.device, *, graph: bool = True) -> float:
    """The least seconds of a call, over rounds of several calls.

    graph: whether a CUDA graph may hold the calls; what runs a backward pass is timed without.
    """
    call()
    once = _time(call, 1, device)
    count = max(min(round(ROUND[device.type] / max(once, 1e-7)), 1000), 1)
    if device.type == "cuda" and graph:
        with suppress(RuntimeError):  # what cannot be captured is timed with the host's part
            return _graphed(call, min(count, GRAPHED), device)
    rounds = ROUNDS if once < ROUND[device.type] else FEW
    return min(_time(call, count, device) for _ in range(rounds)) / count


def host_clock() -> Callable[[], float]:
    """A clock for the host. One thread's own time leaves out what else runs on the machine; the time of several can
    only be taken together."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _time(call: Call, count: int, device: torch.device) -> float:
    if device.type != "cuda":
        clock = host_clock()
        start = clock()
        for _ in range(count):
            call()
        return clock() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _graphed(call: Call, count: int, device: torch.device) -> float:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return min(_time(graph.replay, 1, device) for _ in range(ROUNDS + 1)) / count


class Recorder(TorchDispatchMode):
    """Notes each op that runs a kernel: its name, its cost, its seconds on the host, whether gradients were recorded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[str, Cost, float, bool]] = []
        self._clock = host_clock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = self._clock()
        result = func(*args, **(kwargs or {}))
        taken = self._clock() - start
        found = cost(func, args, kwargs or {}, result)
        if found.kernels:
            self.ops.append((str(func), found, taken, torch.is_grad_enabled()))
        return result


def costs(call: Call) -> list[Cost]:
    """The costs of the ops that a call runs, in order."""
    with (recorder := Recorder()):
        call()
    return [found for _, found, _, _ in recorder.ops]

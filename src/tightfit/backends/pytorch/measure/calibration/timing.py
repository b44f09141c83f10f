"""Seconds of a call, on the CPU by its clock, on a CUDA device inside a CUDA graph; and the host's part of an op in the
midst of a step, measured on a tiny model.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tightfit.backends.pytorch.follow.op_costs import Cost, cost
from tightfit.calibration import Ceilings, family_of

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


# The host's part.

STEPS, WARM_UP = 40, 10
"""Steps of the tiny model, and how many of them do not count."""


class Block(nn.Module):
    """A pre-norm transformer block of two heads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Any:
        rows, length, size = x.shape
        q, k, v = (t.view(rows, length, 2, -1).transpose(1, 2) for t in self.qkv(self.before(x)).split(size, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(written_out_gelu(self.up(self.after(x))))


def written_out_gelu(x: Tensor) -> Tensor:
    """GELU's tanh form in seven ops, as GPT-2 has it: models of real size run such chains."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class TinyStep:
    """A training step with next to nothing to compute, in phases that are called one after another."""

    def __init__(self, device: torch.device) -> None:
        size, vocabulary = 32, 64
        self.embedding = nn.Embedding(vocabulary, size).to(device)
        self.blocks = nn.ModuleList(Block(size) for _ in range(4)).to(device)
        self.head = nn.Linear(size, vocabulary).to(device)
        parameters = [p for part in (self.embedding, self.blocks, self.head) for p in part.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, foreach=False, fused=False)
        self.ids = torch.randint(vocabulary, (1, 8), device=device)
        self.recomputing = False
        self.loss: Tensor | None = None

    def forward(self) -> None:
        x = self.embedding(self.ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputing else block(x)
        self.loss = F.cross_entropy(self.head(x).flatten(0, 1), self.ids.flatten())

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()

    def update(self) -> None:
        self.optimizer.step()


def host_seconds(device: torch.device, ceilings: Ceilings) -> dict[str, float]:
    """Seconds of the host for an op in each phase of a tiny model's step; on the CPU, less those of the op itself."""
    step = TinyStep(device)
    phases: dict[str, Call] = {"forward": step.forward, "backward": step.backward, "optimizer": step.update}
    taken, found = _phase_seconds(step, phases, device), {}
    for name, run in phases.items():
        found[name] = _share(taken[name], _ops(run), device, ceilings)
    step.optimizer.zero_grad()
    step.recomputing = True
    again = _phase_seconds(step, {"forward": step.forward, "backward": step.backward}, device)
    more = sum(again.values()) - taken["forward"] - taken["backward"]
    step.forward()
    found["recompute"] = _share(more, _ops(step.backward, recomputed=True), device, ceilings)
    return found


def _phase_seconds(step: TinyStep, phases: dict[str, Call], device: torch.device) -> dict[str, float]:
    """The median seconds that the host spends in each phase."""
    taken: dict[str, list[float]] = {name: [] for name in phases}
    clock = time.perf_counter if device.type == "cuda" else host_clock()
    for _ in range(STEPS):
        for name, run in phases.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = clock()
            run()
            taken[name].append(clock() - start)
        step.optimizer.zero_grad()
    return {name: statistics.median(rounds[WARM_UP:]) for name, rounds in taken.items()}


def _share(total: float, ops: Sequence[tuple[str, Cost]], device: torch.device, ceilings: Ceilings) -> float:
    if device.type == "cpu":
        total -= sum(_alone(name, found, ceilings) for name, found in ops)
    return max(total / len(ops), 0.0)


def _ops(call: Call, *, recomputed: bool = False) -> list[tuple[str, Cost]]:
    """The ops that a call runs; those of a backward pass that recompute, if so asked."""
    with (recorder := Recorder()):
        call()
    return [(name, found) for name, found, _, recording in recorder.ops if recording or not recomputed]


def _alone(name: str, found: Cost, ceilings: Ceilings) -> float:
    """The measured seconds of an op of a few elements."""
    if "attention" in name:
        direction = "backward" if "backward" in name else "forward"
        return found.flops / (ceilings.attention_rate(direction, found.dtype, 1, 1) or math.inf)
    if found.flops:
        return found.flops / ceilings.products[found.dtype].rate(*(3 * [(found.flops / 2) ** (1 / 3)]))
    return ceilings.memory_seconds(family_of(name), found.dtype, found.bytes_read + found.bytes_written) or 0.0

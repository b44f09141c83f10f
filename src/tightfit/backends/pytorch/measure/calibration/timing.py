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
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.calibration import Calibration, family_of
from tightfit.system import POSIX
from tightfit.trace import Op, Phase

Call = Callable[[], Any]

ROUND_SECONDS, ROUNDS = {"cpu": 1e-3, "cuda": 2e-3}, 5
"""Seconds of a round, at least one call; and rounds, `FEW_ROUNDS` of those that take longer."""
FEW_ROUNDS = 2
CALLS_IN_GRAPH = 50
"""Calls in one CUDA graph, at most."""


def seconds(call: Call, device: torch.device, *, graph: bool = True) -> float:
    """The least seconds of a call, over rounds of several calls.

    graph: whether a CUDA graph may hold the calls; what runs a backward pass is timed without.
    """
    call()
    once = _time(call, 1, device)
    count = max(min(round(ROUND_SECONDS[device.type] / max(once, 1e-7)), 1000), 1)
    if device.type == "cuda" and graph:
        with suppress(RuntimeError):  # what cannot be captured is timed with the host's part
            return _graphed(call, min(count, CALLS_IN_GRAPH), device)
    rounds = ROUNDS if once < ROUND_SECONDS[device.type] else FEW_ROUNDS
    return min(_time(call, count, device) for _ in range(rounds)) / count


def host_clock() -> Callable[[], float]:
    """A clock for the host. One thread's own time leaves out what else runs on the machine; the time of several can
    only be taken together, and Windows counts a thread's in steps of 16 ms."""
    return time.thread_time if POSIX and torch.get_num_threads() == 1 else time.perf_counter


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


def ops_of(call: Call) -> list[Op]:
    """The ops that run a kernel in a call, in order."""
    with (tracker := Tracker()):
        call()
    return tracker.ops


# The host's part.

STEPS, WARM_UP = 40, 10
"""Steps of the tiny model, and how many of them do not count."""
LAYERS = 4


class TinyStep:
    """A training step in phases that are called one after another, of transformers' GPT-2 with next to nothing to
    compute: its ops follow one another as in models of real size."""

    def __init__(self, device: torch.device) -> None:
        config = GPT2Config(
            n_layer=LAYERS, n_embd=32, n_head=2, vocab_size=64, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.model: Any = GPT2LMHeadModel(config).to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False, fused=False)
        self.ids = torch.randint(64, (1, 8), device=device)
        self.loss: Any = None

    def recompute(self) -> None:
        """From now on the backward pass computes activations again."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self) -> None:
        logits = self.model(input_ids=self.ids).logits
        self.loss = F.cross_entropy(logits.flatten(0, 1), self.ids.flatten())

    def backward(self) -> None:
        self.loss.backward()

    def update(self) -> None:
        self.optimizer.step()


def host_seconds(device: torch.device, calibration: Calibration | None = None) -> dict[str, float]:
    """Seconds of the host for an op in each phase of a tiny model's step; on the CPU, less those of the op itself,
    which `calibration` knows."""
    step = TinyStep(device)
    phases: dict[str, Call] = {"forward": step.forward, "backward": step.backward, "optimizer": step.update}
    taken = _phase_seconds(step, phases, device)
    found = {name: _share(taken[name], ops_of(run), device, calibration) for name, run in phases.items()}
    step.recompute()
    del phases["optimizer"]
    again = _phase_seconds(step, phases, device)
    more = sum(again.values()) - taken["forward"] - taken["backward"]
    step.forward()
    repeated = [op for op in ops_of(step.backward) if op.phase is Phase.RECOMPUTE]
    found["recompute"] = _share(more, repeated, device, calibration)
    return found


def _phase_seconds(step: TinyStep, phases: dict[str, Call], device: torch.device) -> dict[str, float]:
    """The median seconds that the host spends in each phase."""
    taken: dict[str, list[float]] = {name: [] for name in phases}
    clock = time.perf_counter if device.type == "cuda" else host_clock()
    step.optimizer.zero_grad()
    for _ in range(STEPS):
        for name, run in phases.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = clock()
            run()
            taken[name].append(clock() - start)
        step.optimizer.zero_grad()
    return {name: statistics.median(rounds[WARM_UP:]) for name, rounds in taken.items()}


def _share(total: float, ops: Sequence[Op], device: torch.device, calibration: Calibration | None) -> float:
    if device.type == "cpu" and calibration is not None:
        total -= sum(_alone(op, calibration) for op in ops)
    return max(total / len(ops), 0.0)


def _alone(op: Op, calibration: Calibration) -> float:
    """The measured seconds of an op of a few elements."""
    if "attention" in op.name:
        direction = "backward" if "backward" in op.name else "forward"
        return op.flops / (calibration.attention_rate(direction, op.dtype, 1, 1) or math.inf)
    if op.flops:
        return op.flops / calibration.matmuls[op.dtype].rate(*(3 * [(op.flops / 2) ** (1 / 3)]))
    return calibration.memory_seconds(family_of(op.name), op.dtype, op.bytes_read + op.bytes_written) or 0.0

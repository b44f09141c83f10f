"""The host's part of an op in the midst of a step, measured on a tiny model."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tightfit.backends.pytorch.follow.op_costs import Cost
from tightfit.backends.pytorch.measure.calibration.timer import Call, Recorder, host_clock
from tightfit.calibration import Ceilings, family_of

ROUNDS, WARM_UP = 40, 10
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
    for _ in range(ROUNDS):
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

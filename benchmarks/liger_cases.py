"""Layers as Liger-Kernel's benchmarks run them on PyTorch and transformers, traced on fake tensors.

Each is a function of tensors. Its passes are compared with the milliseconds that were recorded, and its allocations
with the recorded peak, where a recording says all that the function takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate.target import fake_tensors, scratch_of
from tightfit.devices import MIB, find_device
from tightfit.planning.allocator.replay import replay
from tightfit.planning.timing.op_times import op_seconds
from tightfit.planning.timing.step_time import HOST_SECONDS
from tightfit.trace import Phase, Trace

Outputs = tuple[Tensor, ...]


class Case(NamedTuple):
    """A function, and the tensors that a benchmark holds for it: weights, inputs and labels."""

    call: Callable[[], Outputs]
    inputs: Outputs
    weights: Outputs = ()


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, config.get("dtype", "torch.float32").removeprefix("torch."))
    return found


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


def _made(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """A module with its weights in a format: fake ones cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def _cross_entropy(x: int, config: Mapping[str, Any]) -> Case:
    rows = config["B"] * config["T"]
    logits, labels = _random(rows, x, dtype=torch.float32), torch.zeros(rows, dtype=torch.int64)
    return Case(lambda: (functional.cross_entropy(logits, labels),), (logits,), (labels,))


def _linear_cross_entropy(x: int, config: Mapping[str, Any]) -> Case:
    hidden, labels = _random(x, config["H"], dtype=_dtype(config)), torch.zeros(x, dtype=torch.int64)
    head = _random(config["V"], config["H"], dtype=_dtype(config))
    return Case(lambda: (functional.cross_entropy(functional.linear(hidden, head), labels),), (hidden,),
                (head, labels))


def _embedding(x: int, config: Mapping[str, Any]) -> Case:
    table = _random(x, config["D"], dtype=_dtype(config))
    ids = torch.zeros(config["B"], config["T"], dtype=torch.int64)
    return Case(lambda: (functional.embedding(ids, table),), (), (table, ids))


def _gated_mlp(x: int, config: Mapping[str, Any]) -> Case:
    sizes = {name: config[name] for name in ("hidden_size", "intermediate_size", "hidden_act")}
    mlp = _made(lambda: LlamaMLP(LlamaConfig(**sizes)), _dtype(config))
    given = _random(config.get("bsz") or config["B"], x, config["hidden_size"], dtype=_dtype(config))
    return Case(lambda: (mlp(given),), (given,), tuple(mlp.parameters()))


def _layer_norm(x: int, config: Mapping[str, Any]) -> Case:
    norm, given = nn.LayerNorm(x, eps=config["eps"]), _random(config["M"], x, dtype=_dtype(config))
    return Case(lambda: (norm(given),), (given,), tuple(norm.parameters()))


def _rms_norm(x: int, config: Mapping[str, Any]) -> Case:
    norm = _made(lambda: LlamaRMSNorm(x, eps=config["eps"]), _dtype(config))
    given = _random(config["M"], x, dtype=_dtype(config))
    return Case(lambda: (norm(given),), (given,), tuple(norm.parameters()))


def _rope(x: int, config: Mapping[str, Any]) -> Case:
    hidden, length = config.get("hidden_size", x), config.get("seq_len", x)
    heads, groups = config["num_q_heads"], config["num_kv_heads"]
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=hidden, num_attention_heads=heads))
    q = torch.empty(1, length, heads, hidden // heads, dtype=_dtype(config)).transpose(1, 2).requires_grad_()
    k = torch.empty(1, length, groups, hidden // heads, dtype=_dtype(config)).transpose(1, 2).requires_grad_()
    cos, sin = rotary(k, torch.arange(length).unsqueeze(0))
    return Case(lambda: apply_rotary_pos_emb(q, k, cos, sin), (q, k), (cos, sin))


def _squared_relu(x: int, config: Mapping[str, Any]) -> Case:
    given = _random(config["M"], x, dtype=_dtype(config))
    return Case(lambda: (functional.relu(given).pow(2),), (given,))


CASES: dict[str, Callable[[int, Mapping[str, Any]], Case]] = {
    "cross_entropy": _cross_entropy, "fused_linear_cross_entropy": _linear_cross_entropy, "embedding": _embedding,
    "geglu": _gated_mlp, "swiglu": _gated_mlp, "layer_norm": _layer_norm, "rms_norm": _rms_norm, "rope": _rope,
    "relu_squared": _squared_relu,
}  # fmt: skip


GPUS = {"NVIDIA A100-SXM4-80GB": "a100-80gb-sxm", "NVIDIA H100 80GB HBM3": "h100-sxm"}
PYTORCH = ("huggingface", "torch")
MODES = {"forward": (Phase.FORWARD,), "backward": (Phase.BACKWARD,), "full": (Phase.FORWARD, Phase.BACKWARD)}


class Compared(NamedTuple):
    """A recorded time or peak beside the predicted one, in milliseconds or MiB."""

    device: str
    kernel: str
    mode: str
    x: int
    recorded: float
    predicted: float
    error: float


@cache
def traced(kernel: str, x: int, config: str, gpu: str) -> Trace:
    """Three passes forward and backward of a case: the first makes the gradients, the second adds to them, and the
    ops of the third, in which those of inputs are new, are in the span `timed`.

    kernel, x, config: as a recording has them.
    """
    device = find_device(gpu)
    tracker = Tracker(scratch=scratch_of(device))
    with fake_tensors(device), tracker:
        case = CASES[kernel](x, json.loads(config))
        grads = tuple(map(torch.empty_like, case.call()))
        for timed in (False, False, True):
            with tracker.span("timed" if timed else "warm-up"):
                for tensor in case.inputs if timed else ():
                    tensor.grad = None
                tracker.phase = Phase.FORWARD
                outputs = case.call()
                tracker.phase = Phase.BACKWARD
                torch.autograd.backward(outputs, grads, retain_graph=True)
            del outputs
        return tracker.trace("predicted")


def times(rows: Iterable[Mapping[str, Any]]) -> Iterator[Compared]:
    """Recorded times that the device takes, not the host: longer than issuing the ops."""
    for row in rows:
        if row["metric"] != "speed" or row["provider"] not in PYTORCH or not _told(row):
            continue
        gpu, recorded = GPUS[row["gpu"]], float(row["measured"])
        trace = traced(row["kernel"], row["x"], row["config"], gpu)
        span = trace.span("timed")
        ops = [op for op in trace.ops
               if span.start <= op.tick < span.stop and op.kernels and op.phase in MODES[row["mode"]]]
        if recorded > 1e3 * sum(HOST_SECONDS[op.phase.value] for op in ops):
            yield _compared(row, recorded, 1e3 * sum(op_seconds(op, find_device(gpu)) for op in ops))


def peaks(rows: Iterable[Mapping[str, Any]]) -> Iterator[Compared]:
    """Recorded peaks of allocated memory of both passes, without what a library keeps beside its tensors."""
    for row in rows:
        if row["mode"] == "full" and row["gpu"] in GPUS and _told(row) and row["kernel"] not in OTHERWISE_COUNTED:
            trace = traced(row["kernel"], row["x"], row["config"], GPUS[row["gpu"]])
            yield _compared(row, float(row["peak_mib"]), replay(trace).peak_allocated / MIB)


OTHERWISE_COUNTED = {
    "embedding": "recorded with 12 GB of something else in use",
    "relu_squared": "recorded in units of 4,096 MiB",
}
"""Kernels whose recorded peaks are not of the op alone, and why."""


def _told(row: Mapping[str, Any]) -> bool:
    return bool(row["config"]) and row["kernel"] in CASES


def _compared(row: Mapping[str, Any], recorded: float, predicted: float) -> Compared:
    return Compared(find_device(GPUS[row["gpu"]]).name, row["kernel"], row["mode"], row["x"], recorded,
                    round(predicted, 4), round(predicted / recorded - 1, 4))

"""Measures the machine at hand: what `calibration.Calibration` keeps.

On the CPU every op is called from Python as a step calls it, fresh results and all: small ops cost what the call costs,
and results beyond 32 MiB the pages that the system hands out. On a CUDA device kernels are timed inside a CUDA graph,
so that the host's part stays out; it is measured by itself, as the time to issue a tiny model's step.

Each figure is the least of several short rounds: what else runs on the machine only ever adds.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tightfit.backends.pytorch.measure.calibration.link import measure_link
from tightfit.backends.pytorch.measure.calibration.timing import Call, host_seconds, ops_of, seconds
from tightfit.backends.pytorch.techniques.precision import fp32_products
from tightfit.calibration import MATMULS_IN_OP, Calibration, Curve, Grid, Progress, processor, torch_version
from tightfit.devices import TENSOR_CORES, listed_device

MATMUL_SIZES = {"cpu": (16, 64, 256, 1024), "cuda": (64, 256, 1024, 4096, 16384)}
BATCH_SIZES = {"cpu": (16, 64, 256), "cuda": (64, 256, 1024)}
"""Sizes of matmuls, one in an op and `MATMULS_IN_OP` of them."""
RESULT_BYTES = {
    "cpu": (1 << 10, 1 << 16, 1 << 20, 31 << 20, 36 << 20),
    "cuda": (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25, 1 << 28),
}
"""Sizes of an op's argument. On the CPU the last two lie on either side of glibc's largest threshold for fresh pages.
"""
ARGUMENT_SETS = 8
"""An op is called on so many arguments in turn, and so many results are kept, as a step's caches find them."""
LENGTHS = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096)}
HEADS = {"cpu": (32, 128), "cuda": (64, 128)}
ATTENTION_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 25}
LONGEST_CALL = {"cpu": 0.03, "cuda": 0.05}
"""Seconds: a call that would take longer is not made; its neighbour's speed is taken."""

Case = Callable[[Tensor, Tensor], Call]
"""Makes a call from two vectors of as many elements each, none below 0."""

ROW_FEATURES = 512
"""Features of a row, for ops over rows."""
PARTS = 16
"""Tensors in a list, for multi-tensor ops."""


# The ops whose speed is measured.


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, min(ROW_FEATURES, x.numel()))


def _layer_norm(x: Tensor, y: Tensor) -> Call:
    rows, weight = _rows(x), _rows(y)[0]
    return lambda: torch.native_layer_norm(rows, rows.shape[1:], weight, weight, 1e-5)


def _embedding(x: Tensor, y: Tensor) -> Call:
    table = _rows(x)
    ids = torch.randint(table.shape[0], (table.shape[0],), device=x.device)
    return lambda: F.embedding(ids, table)


def _foreach(x: Tensor, y: Tensor) -> Call:
    parts = list(x.chunk(PARTS))
    return lambda: torch._foreach_mul_(parts, 1.0)


def _fused_adamw(x: Tensor, y: Tensor) -> Call:
    weights, gradients, means, squares = (list(t.chunk(PARTS)) for t in (x, y, torch.zeros_like(x), torch.ones_like(x)))
    steps = [torch.ones((), device=x.device) for _ in weights]
    options: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False,
                               "maximize": False}
    return lambda: torch._fused_adamw_(weights, gradients, means, squares, [], steps, lr=1e-3, **options)


def _where(x: Tensor, y: Tensor) -> Call:
    chosen = torch.rand(x.shape, device=x.device) > 0.5
    return lambda: torch.where(chosen, x, y)


CASES: Mapping[str, Case] = {
    "add": lambda x, y: lambda: x + y,
    "add_": lambda x, y: lambda: x.add_(y, alpha=0.0),
    "sqrt": lambda x, y: x.sqrt,
    "tanh": lambda x, y: x.tanh,
    "gelu": lambda x, y: lambda: F.gelu(x),
    "silu": lambda x, y: lambda: F.silu(x),
    "where": _where,
    "_softmax": lambda x, y: lambda: torch._softmax(_rows(x), -1, False),
    "_safe_softmax": lambda x, y: lambda: torch._safe_softmax(_rows(x), -1),
    "native_layer_norm": _layer_norm,
    "sum": lambda x, y: lambda: _rows(x).sum(0),
    "zeros": lambda x, y: lambda: torch.zeros_like(x),
    "embedding": _embedding,
    "bernoulli_": lambda x, y: lambda: x.bernoulli_(0.9),
    "_foreach_mul_": _foreach,
    "_fused_adamw_": _fused_adamw,
}
"""For each family of `calibration.FAMILIES`, an op at a number of elements."""


# Measurement.


def measure(device: torch.device, progress: Progress | None = None) -> Calibration:
    """Measure that device: on the CPU in about 20 seconds, with the number of threads that torch has now.

    Raises whatever torch raises where the device is out of memory or gone.
    """
    report = progress or (lambda what, share: None)
    cpu = device.type == "cpu"
    with torch.random.fork_rng([] if cpu else [device]), torch.enable_grad():
        torch.empty(31 << 20, dtype=torch.uint8)  # raises malloc's threshold for fresh pages to where training has it
        calibration = Calibration(
            device="CPU" if cpu else torch.cuda.get_device_name(device), kind="cpu" if cpu else "cuda",
            processor=processor(), torch=torch_version(), threads=torch.get_num_threads() if cpu else 0,
            date=datetime.now(UTC).date().isoformat(), **_arithmetic(device, report),
            memory=_families(device, report),
        )
        report("the host", 0.9)
        calibration = replace(calibration, host=host_seconds(device, calibration))
        if not cpu:
            report("copies from and to the host", 0.95)
            calibration = replace(calibration, link=measure_link(device))
    report("done", 1.0)
    return calibration


def _arithmetic(device: torch.device, report: Progress) -> dict[str, Any]:
    """The fields of matmuls and attention."""
    matmuls: dict[str, Grid] = {}
    batched_matmuls: dict[str, Grid] = {}
    attention: dict[str, dict[str, Curve]] = {}
    dtypes = _dtypes(device)
    for number, (name, dtype) in enumerate(dtypes.items()):
        report(f"matmuls in {name}", 0.3 * number / len(dtypes))
        with fp32_products(name == "tf32"):
            matmuls[name] = _matmuls(device, dtype, MATMUL_SIZES[device.type], 1)
            batched_matmuls[name] = _matmuls(device, dtype, BATCH_SIZES[device.type], MATMULS_IN_OP)
        if name != "tf32":
            report(f"attention in {name}", 0.3 * (number + 0.5) / len(dtypes))
            for key, curve in _attention(device, dtype).items():
                attention.setdefault(key, {})[name] = curve
    return {"matmuls": matmuls, "batched_matmuls": batched_matmuls, "attention": attention}


def _dtypes(device: torch.device) -> dict[str, torch.dtype]:
    """Number formats by the name they are kept under."""
    found = {"float32": torch.float32, "float16": torch.float16}
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= TENSOR_CORES["bf16"]:  # else emulated
        found["bfloat16"] = torch.bfloat16
        if device.type == "cuda":
            found["tf32"] = torch.float32
    return found


def _matmuls(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], batch: int) -> Grid:
    """Rates of matmuls in the three layouts that a linear layer's forward and backward passes use, on average."""
    rates: dict[tuple[int, ...], float] = {}
    for places in sorted(product(range(len(sizes)), repeat=3), key=sum):
        m, n, k = (sizes[p] for p in places)
        flops = 3 * 2 * batch * m * n * k
        smaller = [rates[tuple(p - (at == i) for i, p in enumerate(places))] for at in range(3) if places[at]]
        if smaller and flops / min(smaller) > LONGEST_CALL[device.type]:
            rates[places] = statistics.geometric_mean(smaller)
        else:
            rates[places] = flops / seconds(_three_layouts(device, dtype, batch, m, n, k), device)
    steps = range(len(sizes))
    return Grid(sizes, tuple(tuple(tuple(rates[i, j, h] for h in steps) for j in steps) for i in steps))


def _three_layouts(device: torch.device, dtype: torch.dtype, batch: int, m: int, n: int, k: int) -> Call:
    stack = (batch,) if batch > 1 else ()
    multiply = torch.bmm if batch > 1 else torch.mm
    a, b = _random(device, dtype, *stack, m, k), _random(device, dtype, *stack, k, n)
    across, down = _random(device, dtype, *stack, n, k).mT, _random(device, dtype, *stack, k, m).mT

    def call() -> None:
        multiply(a, b)
        multiply(a, across)
        multiply(down, b)

    return call


def _attention(device: torch.device, dtype: torch.dtype) -> dict[str, Curve]:
    """Rates of causal SDPA, forward and backward, as PyTorch chooses the kernel."""
    found: dict[str, Curve] = {}
    for head in HEADS[device.type]:
        rates: dict[str, dict[int, float]] = {"forward": {}, "backward": {}}
        for length in LENGTHS[device.type]:
            for direction, call in _attention_calls(device, dtype, length, head).items():
                flops, known = sum(op.flops for op in ops_of(call)), rates[direction]
                if known and flops / min(known.values()) > LONGEST_CALL[device.type]:
                    break
                known[length] = flops / seconds(call, device, graph=direction == "forward")
        for direction, known in rates.items():
            found[f"{direction} {head}"] = Curve(tuple(known), tuple(known.values()))
    return found


def _attention_calls(device: torch.device, dtype: torch.dtype, length: int, head: int) -> dict[str, Call]:
    count = max(ATTENTION_ELEMENTS[device.type] // (length * head), 1)
    q, k, v = (_random(device, dtype, 1, count, length, head).requires_grad_() for _ in range(3))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.ones_like(output)

    @torch.no_grad()
    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True)}


def _families(device: torch.device, report: Progress) -> dict[str, dict[str, Curve]]:
    """Seconds of families' ops, in float32 and in one 16-bit format."""
    dtypes = _dtypes(device)
    formats = ("float32", "bfloat16" if "bfloat16" in dtypes else "float16")
    count = 2 * max(RESULT_BYTES[device.type])
    pools = {name: [_random(device, dtypes[name], count // dtypes[name].itemsize).abs_() for _ in "xy"]
             for name in formats}
    found: dict[str, dict[str, Curve]] = {}
    families = families_of(device)
    for number, family in enumerate(families):
        report(f"ops like {family}", 0.3 + 0.6 * number / len(families))
        found[family] = {name: _memory(device, CASES[family], *pools[name]) for name in formats}
    return found


def families_of(device: torch.device) -> tuple[str, ...]:
    """The families that are measured: additions alone on a GPU of the catalogue, whose figures give its other ops'
    times, scaled by how fast it adds."""
    listed = device.type == "cuda" and listed_device(torch.cuda.get_device_name(device)) is not None
    return ("add",) if listed else tuple(CASES)


@torch.no_grad()
def _memory(device: torch.device, case: Case, x: Tensor, y: Tensor) -> Curve:
    """Seconds of an op by the bytes it moves."""
    points: dict[float, float] = {}
    for size in RESULT_BYTES[device.type]:
        if points and max(points.values()) / max(points) * size > LONGEST_CALL[device.type]:
            break
        count = size // x.element_size()
        copies = min(ARGUMENT_SETS, x.numel() // count)
        calls = [case(x[i * count : (i + 1) * count], y[i * count : (i + 1) * count]) for i in range(copies)]
        moved = sum(op.bytes_read + op.bytes_written for op in ops_of(calls[0]))
        taken = seconds(_in_turn(calls), device)
        points[float(moved)] = max(taken, *points.values()) if points else taken  # noise never makes more faster
    return Curve(tuple(points), tuple(points.values()))


def _in_turn(calls: list[Call]) -> Call:
    """The calls one after another, the latest results kept."""
    turns, results = cycle(calls), deque[Any](maxlen=len(calls))
    return lambda: results.append(next(turns)())


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)

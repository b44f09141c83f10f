"""Recordings of single ops on GPUs that others published, and the ops that they are of.

A folder holds them as gzipped CSV files, each row with its source, device and microseconds: `matmuls` (dtype, layout,
batch, m, n, k), `attention` (backend, causal, batch, seq, heads, kv_heads, head_dim, direction),
`memory_bound_neusight` (op, rows, columns) and `traced_ops` (op, dtype, shapes, strides of profiled kernels).
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.backends.pytorch.follow.op_costs import cost
from tightfit.devices import Device, find_device
from tightfit.planning.timing import op_times
from tightfit.planning.timing.op_times import ITEM_BYTES
from tightfit.trace import Op, OpClass, Phase

Row = dict[str, Any]
NAMES = {"RTX PRO 6000 Server": "rtx-pro-6000", "V100 32GB": "v100-32gb", "V100 16GB": "v100-16gb",
         "A100 40GB": "a100-40gb"}  # fmt: skip
PAIRED = ("add", "mul", "sub", "div", "add_", "mul_", "sub_", "div_")
OVERLOADS = {**dict.fromkeys(PAIRED, "Tensor"), "pow": "Tensor_Scalar", "fill_": "Scalar"}
LONG = 100e-6
"""Seconds of an op at all of the bandwidth from which on a recording with CUDA events around it, which holds the host's
own 20 to 50 microseconds, tells the kernel's time."""


def rows(folder: Path, name: str) -> Iterator[Row]:
    with gzip.open(folder / f"{name}.csv.gz", "rt", newline="") as file:
        for row in csv.DictReader(file):
            yield {key: int(value) if value.isdecimal() else value for key, value in row.items()}


@cache
def device(name: str) -> Device:
    """The catalogue's card; the V100 PCIe, which is not in it, has lower peaks than the other."""
    if name == "V100 PCIe 32GB":
        return replace(find_device("v100-32gb"), name=name, flops={"fp32": 14e12, "fp16": 112e12})
    return find_device(NAMES.get(name, name).replace(" ", "-"))


def op(name: str, op_class: OpClass, dtype: str, **fields: Any) -> Op:
    return Op(name=name, tick=0, phase=Phase.FORWARD, op_class=op_class, dtype=dtype, **fields)


def matmul(row: Row) -> Op:
    batch, m, n, k, item = row["batch"], row["m"], row["n"], row["k"], ITEM_BYTES[row["dtype"]]
    first, second = row["layout"]
    leading = (k, n if second == "n" else k, n) if "DeepBench" not in row["source"] else \
        (m if first == "n" else k, k if second == "n" else n, m)  # by columns
    if row["layout"] == "tn" and "DeepBench" not in row["source"]:
        leading = (k, k, n)  # a linear layer
    stack = (batch,) if batch > 1 else ()
    return op("aten.bmm.default" if stack else "aten.mm.default", OpClass.CONTRACTION, row["dtype"],
              shapes=((*stack, m, k), (*stack, k, n)), flops=2 * batch * m * n * k, leading=leading,
              bytes_read=batch * item * (m * k + k * n), bytes_written=batch * item * m * n)


def attention(row: Row) -> Op:
    backward, causal, length = row["direction"] == "bwd", row["causal"] == "True", row["seq"]
    pairs = length * (length + 1) // 2 if causal else length * length
    kernel = "flash" if row["backend"] == "FA2" else "cudnn"
    shape = (row["batch"], row["heads"], length, row["head_dim"])
    size = 2 * math.prod(shape)
    return op(f"aten._scaled_dot_product_{kernel}_attention{'_backward' * backward}.default", OpClass.CONTRACTION,
              row["dtype"], shapes=(shape, (row["batch"], row["kv_heads"], length, row["head_dim"])),
              flops=int(4 * row["batch"] * row["heads"] * pairs * row["head_dim"] * (2.5 if backward else 1)),
              bytes_read=4 * size, bytes_written=size, kernels=3 if backward else 1)


def memory_bound(row: Row) -> Op:
    """fp32 and contiguous."""
    columns = int(float(row["columns"]))
    size = 4 * row["rows"] * columns
    name = {"ln": "native_layer_norm", "softmax": "_softmax"}.get(row["op"], row["op"])
    op_class = OpClass.NORMALIZATION if row["op"] in ("ln", "softmax") else OpClass.ELEMENTWISE
    return op(f"aten.{name}.default", op_class, "float32", shapes=((row["rows"], columns),),
              bytes_read=size * (2 if row["op"] in ("add", "mul", "div", "pow") else 1), bytes_written=size)


def traced(row: Row) -> Op | None:
    """A profiled op, called again on fake tensors of its shapes and strides; None where they do not say how: of
    sums and means the dimensions were not recorded."""
    name = row["op"].removeprefix("aten::")
    shapes = json.loads(row["shapes"])
    strides = json.loads(row["strides"] or "null") or [None] * len(shapes)
    dtype = getattr(torch, row["dtype"])
    with FakeTensorMode():
        given = [torch.empty_strided(shape, stride, dtype=dtype) if stride else torch.empty(shape, dtype=dtype)
                 for shape, stride in zip(shapes, strides, strict=True) if shape]
        calls: dict[str, Callable[[], tuple[Any, ...]]] = {
            **dict.fromkeys(("mm", "bmm", "copy_"), lambda: tuple(given[:2])),
            "addmm": lambda: tuple(given[:3]), "_softmax": lambda: (given[0], -1, False),
            "native_layer_norm": lambda: (given[0], list(given[1].shape), given[1], given[2], 1e-5),
            **dict.fromkeys(PAIRED, lambda: (given[0], given[1] if len(given) > 1 else 2.0)),
            **dict.fromkeys(("sigmoid", "gelu", "silu", "neg", "rsqrt"), lambda: (given[0],)),
            **dict.fromkeys(("sigmoid_backward",), lambda: tuple(given[:2])),
            "threshold_backward": lambda: (given[0], given[1], 0.0), "clamp": lambda: (given[0], 0.0),
            "clamp_min": lambda: (given[0], 0.0), "pow": lambda: (given[0], 2.0), "fill_": lambda: (given[0], 0.0),
        }
        if name not in calls or not given:
            return None
        func = getattr(getattr(torch.ops.aten, name), OVERLOADS.get(name, "default"))
        try:
            arguments = calls[name]()
            return Op(name=str(func), tick=0, phase=Phase.FORWARD,
                      **cost(func, arguments, {}, func(*arguments))._asdict())
        except (RuntimeError, IndexError, ValueError):
            return None


def in_cache(row: Row, made: Op) -> bool:
    return made.bytes_read + made.bytes_written < op_times.CACHED_SHARE * device(row["device"]).l2_bytes


def summary(values: list[float]) -> dict[str, Any]:
    """Errors without sign, and the median with it."""
    sizes = sorted(map(abs, values))
    return {"rows": len(values), "median": round(statistics.median(sizes), 4),
            "p95": round(sizes[min(int(0.95 * len(sizes)), len(sizes) - 1)], 4),
            "median_with_sign": round(statistics.median(values), 4)}

"""Times of single ops, as the time model predicts them without a calibration, against public recordings.

FOLDER holds the recordings, as gzipped CSV files, each row with its source: `matmuls` (device, dtype, layout, batch, m,
n, k), `attention` (backend, causal, batch, seq, heads, kv_heads, head_dim, direction), `memory_bound_neusight` (op,
rows, columns) and `traced_ops` (op, dtype, shapes, strides of profiled kernels), all with device and microseconds.

What is recorded, of each kind and card: the error predicted / recorded - 1, its median and 95th percentile without
sign. Products are given apart where their operands fit the L2 cache, from which a kernel repeated alone reads them.
`left out`: a tile's prologue fitted on the other cards and the share of the peak on half of a card's own rows, and the
error on the other half. `work`: for cards that the catalogue calls measured, what all recordings of one card and format
are off by together, by the kinds of work that errors of steps are made of; the 90th percentile is their error.
Run: python benchmarks/ops_vs_gpu.py FOLDER
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import record
from tightfit.backends.pytorch.follow.op_costs import cost
from tightfit.devices import Device, find_device
from tightfit.planning.timing import contractions, op_times
from tightfit.planning.timing.contractions import Matmul
from tightfit.planning.timing.errors import Work, work_of
from tightfit.planning.timing.op_times import ITEM_BYTES, op_seconds
from tightfit.trace import Op, OpClass, Phase

Row = dict[str, Any]
NAMES = {"RTX PRO 6000 Server": "rtx-pro-6000", "V100 32GB": "v100-32gb", "V100 16GB": "v100-16gb",
         "A100 40GB": "a100-40gb"}  # fmt: skip
LARGE = 64e6
"""Bytes from which on a recording with CUDA events around one op tells the kernel's time."""
LEFT_OUT = 200
"""Rows of each card that fits with cards left out take."""


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
              bytes_read=size * (2 if row["op"] in ("add", "mul", "div") else 1), bytes_written=size)


def traced(row: Row) -> Op | None:
    """A profiled op, called again on fake tensors of its shapes and strides; None where they do not say how."""
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
            **dict.fromkeys(("add", "mul", "sub", "div"), lambda: (given[0], given[1] if len(given) > 1 else 2.0)),
            **dict.fromkeys(("sigmoid", "gelu", "silu", "neg"), lambda: (given[0],)),
        }
        if name not in calls or not given:
            return None
        func = getattr(getattr(torch.ops.aten, name), "Tensor" if name in ("add", "mul", "sub", "div") else "default")
        try:
            arguments = calls[name]()
            return Op(name=str(func), tick=0, phase=Phase.FORWARD,
                      **cost(func, arguments, {}, func(*arguments))._asdict())
        except (RuntimeError, IndexError, ValueError):
            return None


def errors(found: Iterable[tuple[Row, Op]], key: Callable[[Row, Op], str]) -> dict[str, Any]:
    """Errors by a key of row and op."""
    by_key: dict[str, list[float]] = defaultdict(list)
    for row, made in found:
        predicted = op_seconds(made, device(row["device"])) * 1e6
        by_key[key(row, made)].append(predicted / float(row["microseconds"]) - 1)
    return {name: summary(values) for name, values in sorted(by_key.items())}


def summary(values: list[float]) -> dict[str, Any]:
    sizes = sorted(map(abs, values))
    return {"rows": len(values), "median": round(statistics.median(sizes), 4),
            "p95": round(sizes[min(int(0.95 * len(sizes)), len(sizes) - 1)], 4),
            "median_with_sign": round(statistics.median(values), 4)}


def by_work(found: Iterable[tuple[Row, Op]]) -> dict[str, Any]:
    """Errors of all the seconds of each measured card and format, by kind of work."""
    totals: dict[tuple[Work, str, str], list[tuple[float, float]]] = defaultdict(list)
    for row, made in found:
        card = device(row["device"])
        if card.evidence == "measured" and made.dtype in ("float32", "float16", "bfloat16"):
            pair = op_seconds(made, card) * 1e6, float(row["microseconds"])
            totals[work_of(made, card, False), card.name, made.dtype].append(pair)
    kinds: dict[Work, dict[str, float]] = defaultdict(dict)
    for (kind, name, dtype), pairs in sorted(totals.items()):
        predicted, recorded = map(sum, zip(*pairs, strict=True))
        kinds[kind][f"{name} {dtype}"] = round(predicted / recorded - 1, 4)
    return {kind: {"90th percentile": sorted(map(abs, each.values()))[math.ceil(0.9 * len(each)) - 1], **each}
            for kind, each in kinds.items()}


def in_cache(row: Row, made: Op) -> bool:
    return made.bytes_read + made.bytes_written < op_times.CACHED_SHARE * device(row["device"]).l2_bytes


def left_out(found: list[tuple[Row, Op]]) -> dict[str, Any]:
    """16-bit products out of the cache, each card left out of the fit in turn."""
    cards: dict[str, list[tuple[Row, Op]]] = defaultdict(list)
    for row, made in found:
        if row["dtype"] == "bfloat16" and not in_cache(row, made):
            cards[row["device"]].append((row, made))
    chooser = random.Random(0)
    cards = {name: chooser.sample(each, min(len(each), LEFT_OUT)) for name, each in cards.items()}
    result = {}
    for name, own in cards.items():
        others = [each for other, each in cards.items() if other != name]
        prologue = min((50, 100, 150, 200, 250), key=lambda steps: sum(_fitted(each, steps)[1] for each in others))
        share = _fitted(own[::2], prologue)[0]
        result[name] = {"prologue": prologue, "share": share,
                        **summary([_with(row, made, share, prologue) for row, made in own[1::2]])}
    return result


def _fitted(found: list[tuple[Row, Op]], prologue: int) -> tuple[float, float]:
    """The share of the peak with the least median error, and that error."""
    return min(((share / 100, statistics.median(abs(_with(*pair, share / 100, prologue)) for pair in found))
                for share in range(50, 110, 3)), key=lambda pair: pair[1])


def _with(row: Row, made: Op, share: float, prologue: int) -> float:
    """A product's error with other constants."""
    card = device(row["device"])
    rate = card.peak(row["dtype"]) * share
    product = Matmul(1, row["m"], row["n"], row["k"], made.leading)
    rate *= contractions.alignment(product, 2, card)
    busy = contractions.matmul_seconds(product, rate, card.units, prologue)
    moved = (made.bytes_read + made.bytes_written) / card.bandwidth / op_times.memory_share(card)
    return (max(busy, moved) + op_times.CLASS_START[OpClass.CONTRACTION]) * 1e6 / float(row["microseconds"]) - 1


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    folder = Path(sys.argv[1])
    products = [(row, matmul(row)) for row in rows(folder, "matmuls")]
    profiled = [(row, made) for row in rows(folder, "traced_ops") if (made := traced(row)) is not None]
    large = [(row, made) for row in rows(folder, "memory_bound_neusight")
             if (made := memory_bound(row)).bytes_read + made.bytes_written > LARGE]
    fused = [(row, attention(row)) for row in rows(folder, "attention")]
    bound = [(row, made) for row, made in profiled if not made.flops]
    results = {
        "work": by_work([*(p for p in products if not in_cache(*p)), *fused, *large, *bound]),
        "products": errors((p for p in products if not in_cache(*p)), lambda r, _: f"{r['device']} {r['dtype']}"),
        "products in the cache": errors((p for p in products if in_cache(*p)),
                                        lambda r, _: f"{r['device']} {r['dtype']}"),
        "products left out": left_out(products),
        "attention": errors(fused,
                            lambda r, _: f"{r['device']} {r['backend'].split()[0]} {r['direction']}"),
        "element-wise and norms, fp32": errors(large, lambda r, _: f"{r['device']} {r['op']}"),
        "profiled": errors(profiled, lambda r, made: " ".join(
            [r["device"], r["dtype"], r["op"].removeprefix("aten::"), made.layout]).strip()),
    }
    print(json.dumps(results["work"], indent=1))
    for kind, found in list(results.items())[1:]:
        print(kind)
        for name, each in found.items():
            print(f"  {name:44} {each['rows']:5} rows  median {each['median']:6.1%}  p95 {each['p95']:6.1%}  "
                  f"{each['median_with_sign']:+6.1%}")
    record.write("ops_vs_gpu", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

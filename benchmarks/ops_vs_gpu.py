"""Times of single ops, as the time model predicts them without a calibration, against public recordings.

FOLDER holds the recordings: those of `op_recordings`, and `fused_ops_liger` and `memory_liger` (gpu, kernel, mode, x,
config, milliseconds or peak MiB), whose ops `liger_cases` traces.

What is recorded, of each kind and card: the error predicted / recorded - 1, its median and 95th percentile without
sign. Products are given apart where their operands fit the L2 cache, from which a kernel repeated alone reads them.
`left out`: of products, a tile's prologue and the share of the peak at the full clock fitted on the other cards, and
the share that is sustained on half of a card's own rows, with the error on the other half; of attention, its kernels'
rates fitted on the other cards. `work`: for cards that the catalogue calls measured, what all recordings of one card
and format are off by together, by the kinds of work that errors of steps are made of; the 90th percentile is their
error. `held to`: what each of these is meant to be within, at the median and for 95 of 100.
Run: python benchmarks/ops_vs_gpu.py FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import record
from liger_cases import Compared, peaks, times
from op_recordings import LONG, Row, attention, device, in_cache, matmul, memory_bound, rows, summary, traced
from ops_left_out import attention_left_out, left_out
from tightfit.planning.timing.op_times import op_seconds
from tightfit.planning.timing.uncertainty import Work, work_of
from tightfit.trace import Op

PAIRS = {"fwd": "forward", "bwd": "backward"}
POWERFUL, LIMITED = (0.12, 0.5), (0.2, 0.9)
"""Median and 95th percentile that products are held to, and on cards whose power limits them most."""
LIMITS = {"L40S": LIMITED, "RTX PRO 6000 Server": LIMITED}
ATTENTION = {"fwd": 0.1, "bwd": 0.12}
FUSED = 0.08
PEAK = 0.01
KINDS = {"layer_norm": "norms", "native_layer_norm": "norms", "rms_norm": "norms", "ln": "norms",
         "softmax": "softmax", "_softmax": "softmax", "cross_entropy": "cross-entropy", "rope": "rope"}
"""The kind of a fused op by its name; others are element-wise, and products and gathers none."""
APART = ("geglu", "swiglu", "fused_linear_cross_entropy", "embedding", "mm", "bmm", "addmm")
VISIBLE = 10e-6
"""Seconds from which on a profiled kernel is more than its start."""


def errors(found: Iterable[tuple[Row, Op]], key: Callable[[Row, Op], str]) -> dict[str, Any]:
    """Errors by a key of row and op."""
    by_key: dict[str, list[float]] = defaultdict(list)
    for row, made in found:
        predicted = op_seconds(made, device(row["device"])) * 1e6
        by_key[key(row, made)].append(predicted / float(row["microseconds"]) - 1)
    return {name: summary(values) for name, values in sorted(by_key.items())}


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


def by_name(compared: Iterable[Compared]) -> dict[str, Any]:
    """Errors of layers by card, kernel and pass."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in compared:
        found[f"{each.device} {each.kernel} {each.mode}"].append(each.error)
    return {name: summary(values) for name, values in sorted(found.items())}


def kinds(
    large: list[tuple[Row, Op]], profiled: list[tuple[Row, Op]], compared: Iterable[Compared]
) -> dict[str, dict[str, Any]]:
    """Errors of fused and element-wise ops, by their kind."""
    found: dict[str, list[float]] = defaultdict(list)
    seen = [*large, *(pair for pair in profiled if float(pair[0]["microseconds"]) > VISIBLE * 1e6)]
    for row, made in seen:
        name = row["op"].removeprefix("aten::")
        if name not in APART:
            predicted = op_seconds(made, device(row["device"])) * 1e6
            found[KINDS.get(name, "element-wise")].append(predicted / float(row["microseconds"]) - 1)
    for each in compared:
        if each.kernel not in APART:
            found[KINDS.get(each.kernel, "element-wise")].append(each.error)
    return {name: summary(values) for name, values in sorted(found.items())}


def held_to(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Lines of what is meant and what is measured."""
    for name, each in results["products left out"].items():
        median, p95 = LIMITS.get(name, POWERFUL)
        yield {"of": f"matrix products left out: {name}", "limit": median, "p95_limit": p95, **each}
    for direction, each in results["attention left out"].items():
        yield {"of": f"attention left out: {PAIRS[direction]}", "limit": ATTENTION[direction], **each}
    for name, each in results["fused ops"].items():
        yield {"of": f"fused ops: {name}", "limit": FUSED, **each}
    every = [peak["error"] for peak in results["peak memory of ops"]]
    yield {"of": "peak memory of ops", "limit": PEAK, **summary(every)}


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    folder = Path(sys.argv[1])
    products = [(row, matmul(row)) for row in rows(folder, "matmuls")]
    profiled = [(row, made) for row in rows(folder, "traced_ops") if (made := traced(row)) is not None]
    large = [(row, made) for row in rows(folder, "memory_bound_neusight")
             if (made := memory_bound(row)).bytes_read + made.bytes_written > LONG * device(row["device"]).bandwidth]
    fused = [(row, attention(row)) for row in rows(folder, "attention")]
    bound = [(row, made) for row, made in profiled if not made.flops]
    liger, peak = list(times(rows(folder, "fused_ops_liger"))), list(peaks(rows(folder, "memory_liger")))
    results: dict[str, Any] = {
        "work": by_work([*(p for p in products if not in_cache(*p)), *fused, *large, *bound]),
        "products": errors((p for p in products if not in_cache(*p)), lambda r, _: f"{r['device']} {r['dtype']}"),
        "products in the cache": errors((p for p in products if in_cache(*p)),
                                        lambda r, _: f"{r['device']} {r['dtype']}"),
        "products left out": left_out(products),
        "attention": errors(fused,
                            lambda r, _: f"{r['device']} {r['backend'].split()[0]} {r['direction']}"),
        "attention left out": attention_left_out(fused),
        "element-wise and norms, fp32": errors(large, lambda r, _: f"{r['device']} {r['op']}"),
        "profiled": errors(profiled, lambda r, made: " ".join(
            [r["device"], r["dtype"], r["op"].removeprefix("aten::"), made.layout]).strip()),
        "layers": by_name(liger), "fused ops": kinds(large, profiled, liger),
    }
    print(json.dumps(results["work"], indent=1))
    for kind, found in list(results.items())[1:]:
        print(kind)
        for name, each in found.items():
            print(f"  {name:44} {each['rows']:5} rows  median {each['median']:6.1%}  p95 {each['p95']:6.1%}  "
                  f"{each['median_with_sign']:+6.1%}")
    results["peak memory of ops"] = [each._asdict() for each in peak]
    results["held to"] = list(held_to(results))
    for line in results["held to"]:
        print(f"{line['of']}: {line['median']:.1%}, held to {line['limit']:.0%}")
    record.write("ops_vs_gpu", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

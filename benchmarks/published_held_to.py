"""Limits on the errors of predictions of published runs, beside the errors measured.

Of the allocator's own figures few were published: `max_memory_allocated` by runs of grade B alone, what it reserved by
one run. So that line stands beside the peaks of single layers in results/ops_vs_gpu.json.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

from published_intervals import SHARE, interval, needed

Row = dict[str, Any]
SPEED, SPEED_P95 = 0.1, 0.3
BACKWARD = 0.1
ALLOCATOR, ADAPTERS, DRIVER = 0.01, 0.05, 0.06
FIGURES = ("speed", "memory")


def held_to(rows: Sequence[Row], grades: Collection[str]) -> list[dict[str, Any]]:
    """Lines of what is meant and what is measured. grades: of which figures count, but for the last two lines'."""
    best = [row for row in rows if row["grade"] in grades]
    plain = [row for row in best if not row["kernels"]]
    counted = [row for row in rows if row.get("memory", {}).get("counted") in ("allocated", "reserved")]
    adapters = [row for row in counted if "lora" in row["id"] and row["memory"]["counted"] == "allocated"
                and not row["source"].startswith("Lightning-AI")]  # whose model is its own
    far = [row[figure] for row in rows for figure in FIGURES if "reason" in row.get(figure, {})]
    timed = [row for row in best if "speed" in row]
    return [
        _line("speed, plain kernels", [row["speed"]["error"] for row in plain if "speed" in row], SPEED, SPEED_P95),
        _line("backward pass of whole fp32 models", [row["backward"]["error"] for row in best if "backward" in row],
              BACKWARD),
        *(_line(f"allocator's memory, grade {grade}", [row["memory"]["error"] for row in counted
                                                       if row["grade"] == grade], ALLOCATOR)
          for grade in sorted({row["grade"] for row in counted})),
        _line("allocator's memory with LoRA and QLoRA of transformers, peft and bitsandbytes",
              [row["memory"]["error"] for row in adapters], ADAPTERS),
        _line("driver's memory, plain kernels",
              [row["memory"]["error"] for row in plain if row.get("memory", {}).get("counted") == "driver"], DRIVER),
        {"of": "off by more than 20 %, with a reason, any grade", "rows": len(far), "limit": 1.0,
         "part": round(sum(bool(figure["reason"]) for figure in far) / max(len(far), 1), 4)},
        {"of": "speeds inside their interval", "rows": len(timed), "limit": SHARE,
         "part": round(sum(needed(row) <= interval(row) for row in timed) / max(len(timed), 1), 4)},
    ]


def _line(name: str, errors: Sequence[float], limit: float, p95_limit: float | None = None) -> dict[str, Any]:
    ordered = sorted(map(abs, errors))
    line: dict[str, Any] = {"of": name, "rows": len(ordered), "limit": limit}
    if p95_limit is not None:
        line["p95_limit"] = p95_limit
    if ordered:
        line |= {"median": round(statistics.median(ordered), 4), "p95": ordered[math.ceil(0.95 * len(ordered)) - 1]}
    return line

"""The page of what was measured on a GPU, from the records that `make gpu` writes into results/."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from recorded import RESULTS, Table
from tightfit.calibration import Calibration
from tightfit.doctor.calibrate import calibration_rows

Record = Mapping[str, Any]
Parts = Iterator[str | Table]


def gpu_page(results: Path = RESULTS) -> list[str | Table]:
    """The page's parts: a section for each record that is there, and what is still to be measured."""
    parts: list[str | Table] = ["# Measured on a GPU"]
    missing = []
    for title, pattern, section in SECTIONS:
        found = sorted(results.glob(f"{pattern}.json"))
        if found:
            parts.append(f"## {title}")
        else:
            missing.append(title[0].lower() + title[1:])
        for path in found:
            record = json.loads(path.read_text("utf-8"))
            made, gpu = record["environment"], record.get("gpu")
            name = gpu["name"] if isinstance(gpu, dict) else gpu or made["device"]
            parts.append(f"{name}; recorded {made['date']} with torch {made['torch']}, commit {made['commit']}: "
                         f"[{path.name}](../results/{path.name}).")
            parts += section(record)
    if missing:
        parts.append(f"Not yet measured: {', '.join(missing)}. `make gpu` measures and records them on a machine with "
                     "a CUDA device; `benchmarks/gpu.sh --dry FOLDER` tries the same out on a processor.")
    return parts


def plans(record: Record) -> Parts:
    """Predicted memory and time over the recipes of every technique."""
    yield (f"{record['measured']} of {record['planned']} recipes measured, {len(record['refused'])} cannot run there, "
           f"{len(record['failed'])} failed; planned to fit and did not: {len(record['false_fits'])}.")
    if first := record.get("first_planned"):
        reserved, time = (first["errors"][name] for name in ("reserved", "step time, uncalibrated"))
        yield ("The figures below are of plans made again, with the source as it has become since. As these recipes "
               f"were planned before they ran, reserved memory was off by {_share(reserved['median'])} at the median "
               f"and {_share(reserved['p95'])} at 95 %, a step's time by {_share(time['median'])} and "
               f"{_share(time['p95'])}, and {len(first['false_fits'])} did not fit that were planned to.")
    yield ("goal", "at most", "measured"), [
        (goal["goal"], _share(goal["at_most"]), _share(goal["figure"])) for goal in record["goals"]]
    yield ("error of", "cases", "median", "95 %", "worst"), [
        (name, str(e["count"]), *(_share(e[figure]) for figure in ("median", "p95", "worst")))
        for name, e in record["errors"].items() if e["count"]]


def beyond(record: Record) -> Parts:
    """Steps of models that are larger than the memory they are given."""
    same = {True: "yes", False: "no", None: "not measured"}
    yield (f"Losses, norms and weights of streamed steps are the resident ones' to the last bit: "
           f"{same[record['streamed_is_resident']]} (the resident step is itself when repeated: "
           f"{same[record['resident_is_itself']]}).")
    kinds = ("seconds", "peak_allocated", "peak_reserved", "host")
    yield ("step", "tokens", "tokens/s", "MFU", *(f"{kind.replace('_', ' ')}, of predicted" for kind in kinds)), [
        (row["case"], f"{row['tokens']:,}", f"{row['tokens_per_second']:,}", _share(row["mfu"]),
         *(_share(row["of_predicted"].get(kind)) for kind in kinds)) for row in record["rows"]]
    yield ("published by", "card", "tokens/s"), [
        (row["who"], row["gpu"], f"{row['tokens_per_second']:,}") for row in record["published"]]


def tests(record: Record) -> Parts:
    """Outcomes of the tests that need a device."""
    yield f"{record['passed']} passed, {record['failed']} failed, {record['skipped']} skipped."
    for name, test in record["tests"].items():
        if test["outcome"] == "failed":
            yield f"Failed: `{name}`" + (f": {test['note']}." if "note" in test else ".")


def allocators(record: Record) -> Parts:
    """The simulated allocator beside the real one, block by block."""
    yield ("run", "allocations", "blocks elsewhere than simulated", "reserved at most, GiB", "simulated"), [
        (name, f"{run['allocations']:,}", str(run["moved"]), *(f"{size / 2**30:.3f}" for size in run["peak_reserved"]))
        for name, run in record["runs"].items()]


def calibrated(record: Record) -> Parts:
    """The machine's own speeds."""
    rows = calibration_rows(TypeAdapter(Calibration).validate_python(record["calibration"]))
    yield ("what", "measured"), rows


def contexts(record: Record) -> Parts:
    """Memory outside of PyTorch's allocator."""
    yield ("after", "MiB outside of the allocator"), [
        (stage, f"{row['outside'] / 2**20:,.0f}" if "outside" in row else "failed")
        for stage, row in record["stages"].items()]


def frontier(record: Record) -> Parts:
    """Throughput of the plan and of peers by the memory they are given."""
    peers = any(not row["who"].startswith("the plan") for row in record["points"])
    missing = "" if peers else " Peers on the same budgets are not yet measured."
    yield f"{record['model']}, {record['seq_len']:,} tokens, global batch {record['batch_size']}.{missing}"
    yield ("GiB", "who", "flags", "tokens/s"), [
        (f"{row['budget_bytes'] / 2**30:.1f}", row["who"], row["rung"], f"{row['tokens_per_second']:,.0f}")
        for row in record["points"]]


def learning(record: Record) -> Parts:
    """Held-out loss of every precision and optimizer."""
    yield ("run", "above fp32 AdamW, nats", "allowed"), [
        (name, f"{run['above_fp32_adamw']:+.3f}", f"{run['tolerance']:.2f}") for name, run in record["runs"].items()]


def quickstart(record: Record) -> Parts:
    """The quickstart's end."""
    summary = record["summary"]
    yield ("what", "measured"), [
        (name.replace("_", " "), f"{summary[name]:,.4g}")
        for name in ("eval_loss", "unigram_loss", "tokens_per_second", "seconds")
        if isinstance(summary.get(name), int | float)]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}" if abs(value) < 0.01 else f"{value:.1%}"


SECTIONS: tuple[tuple[str, str, Callable[[Record], Parts]], ...] = (
    ("Plans against measurements", "plan_vs_gpu-*", plans),
    ("The allocator", "allocator_recordings-*", allocators),
    ("Beyond the card's memory", "beyond_gpu-*", beyond),
    ("Tests on the card", "gpu_tests-*", tests),
    ("Speeds of the card and its link", "calibration-*", calibrated),
    ("Memory of the context", "context_bytes-*", contexts),
    ("Throughput against memory", "frontier-*", frontier),
    ("Learning", "convergence-*", learning),
    ("Quickstart", "quickstart-*", quickstart),
)
"""Titles, the names of their records, and what is told of each."""

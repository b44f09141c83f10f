"""What each op of a training step takes on a CUDA device, beside what the time model says of the same op.

A few cases of `gpu_cases`, each in a process of its own: plain steps are timed, then one is profiled with every op
followed. Ops of one name, shape and format are one row. `measured` and `predicted` are seconds of all its runs in the
step, `calibrated` the same with the card's measured calibration; a kernel that no op launched, such as a compiled one,
has no prediction of its own. Written to results/gpu_ops-GPU.json as cases end.

Run: python benchmarks/gpu_ops.py [--minutes 3] [--only WORD]
     python benchmarks/gpu_ops.py --again    predict the recorded ops once more, with no GPU, and say what is off
     python benchmarks/gpu_ops.py --device cpu   a few tiny cases, anywhere
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from plan_vs_gpu import cuda_unopened

with cuda_unopened():
    import torch
    from pydantic import TypeAdapter

    import gpu_truth
    import record
    from forking import Job, run_forked
    from gpu_cases import Aim, Case, smoke_cases, write_configurations
    from gpu_predictions import device_of
    from gpu_runs import calibration_of, on_gpu
    from random_global_batches import random_global_batch
    from tightfit.backends.measuring import measure
    from tightfit.backends.pytorch.backend import PytorchBackend
    from tightfit.calibration import Calibration
    from tightfit.devices import Device
    from tightfit.errors import Refused
    from tightfit.planning.defaults import resolve
    from tightfit.planning.timing.op_times import op_seconds
    from tightfit.recipe import Recipe
    from tightfit.trace import Op

LINES = (
    "llama-3.2-1b 4x2048", "gpt2 16x1024", "bert-large 32x384", "gpt2-medium 8x1024 precision=fp32",
    "llama-3.2-1b 4x2048 precision=bf16-pure precision.rounding=stochastic optimizer=adamw-8bit", "t5-base 24x512",
    "gpt2 16x1024 compile=per-block", "llama-3.2-1b 4x2048 loss=chunked checkpointing=every-block",
    "gpt2 8x1024 attention=eager", "llama-3.2-1b 4x2048 compile=per-block", "gpt2-medium 16x1024 precision=tf32",
    "mixtral-0.9b 8x1024", "vit-base 128x1", "llama-3.2-1b 4x2048 loss=liger", "bert-base 64x512 precision=fp16",
    "qwen2.5-0.5b 8x1024 optimizer=adafactor", "llama-3.2-1b 4x2048 compile=per-block precision=fp8",
    "gpt2 8x1024 attention=sdpa attention.kernel=efficient",
)
"""What tells most comes first."""
SECONDS = 120.0
TOLD = ("name", "phase", "op_class", "shapes", "dtype", "flops", "bytes_read", "bytes_written", "kernels", "leading",
        "layout")
Row = dict[str, Any]


def observe(recipe: Recipe, device: Device) -> Row:
    """A recipe's step, measured in this process: seconds of the step and its phases, and its ops."""
    if device.kind == "cpu":
        torch.set_num_threads(1)  # a forked process cannot use its parent's threads
    recipe, backend = resolve(recipe, device), PytorchBackend()
    build = backend.build(recipe, device)
    batches = [random_global_batch(recipe, build.task, build.facts, seed) for seed in range(2)]
    found = measure(backend, backend.step(build), cycle(batches))
    groups: dict[str, Row] = {}
    for op, times in found.trace.step_ops():
        told = {name: getattr(op, name) for name in TOLD}
        group = groups.setdefault(json.dumps(told), {**told, "runs": 0, "measured": 0.0})
        group["runs"] += times
        group["measured"] += times * (op.seconds or 0.0)
    return {"step_seconds": found.step_seconds, "phase_seconds": {p.value: s for p, s in found.phase_seconds.items()},
            "tf32": recipe.tf32, "ops": sorted(groups.values(), key=lambda group: -group["measured"])}


def with_predictions(row: Row, device: Device, calibration: Calibration | None) -> Row:
    """A measured case with the seconds that are predicted of its ops."""
    known = TypeAdapter(Op)
    needed = {field.name for field in fields(Op)} & set(TOLD)
    ops = []
    for group in row["ops"]:
        op = known.validate_python({"tick": 0, **{name: group[name] for name in needed}})
        launched = bool(group["shapes"] or group["bytes_read"] or group["bytes_written"])
        seconds = {"predicted": op_seconds(op, device, tf32=row["tf32"]) if launched else None}
        if calibration is not None:
            seconds["calibrated"] = op_seconds(op, device, calibration, tf32=row["tf32"]) if launched else None
        ops.append({**group, **{name: each and each * group["runs"] for name, each in seconds.items()}})
    return {**row, "ops": ops}


def said(name: str, row: Row) -> str:
    """A case's seconds by class of op, measured and predicted of those that have a prediction."""
    by_class: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for op in row["ops"]:
        which = by_class[op["op_class"]]
        which[0 if op["predicted"] is not None else 2] += op["measured"]
        which[1] += op["predicted"] or 0.0
    parts = [f"{kind} {told * 1e3:.1f} ms, {planned * 1e3:.1f} predicted" + (f", {rest * 1e3:.1f} more" if rest else "")
             for kind, (told, planned, rest) in sorted(by_class.items(), key=lambda pair: -sum(pair[1]))]
    busy = sum(op["measured"] for op in row["ops"])
    return f"{name}: step {row['step_seconds'] * 1e3:.1f} ms, busy {busy * 1e3:.1f}: {'; '.join(parts)}"


def write(rows: Mapping[str, Row], gpu: Mapping[str, Any]) -> None:
    """Add cases to the card's record; without `record.write`, which asks CUDA, and this process forks."""
    path = record.RESULTS / f"gpu_ops-{record.slug(gpu['name'])}.json"
    before = json.loads(path.read_text())["cases"] if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"gpu": gpu, "torch": torch.__version__, "date": datetime.now(UTC).date().isoformat(),
                                "cases": {**before, **rows}}) + "\n")


def again(paths: Iterable[Path]) -> None:
    """Predict what is recorded once more."""
    for path in paths:
        told = json.loads(path.read_text())
        device = device_of(told["gpu"])
        rows = {name: with_predictions(row, device, calibration_of(device)) for name, row in told["cases"].items()}
        path.write_text(json.dumps({**told, "cases": rows}) + "\n")
        print(*(said(name, row) for name, row in rows.items()), sep="\n")


def main() -> int:
    """The exit status: 0; 1 where a case failed; 2 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="nothing runs for longer")
    parser.add_argument("--only", default="", help="cases whose line has this in it")
    parser.add_argument("--again", action="store_true", help="predict the recorded ops again; needs no GPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="the CPU tries the way it goes")
    asked = parser.parse_args()
    if asked.again:
        again(record.RESULTS.glob("gpu_ops-*.json"))
        return 0
    deadline = time.monotonic() + 60 * asked.minutes
    try:
        facts = gpu_truth.facts_of(gpu_truth.cpu()) if asked.device == "cpu" else on_gpu()
    except Refused as reason:
        print(f"gpu_ops: {reason}", file=sys.stderr)
        return 2
    device, failed = device_of(facts), False
    calibration = calibration_of(device)
    with tempfile.TemporaryDirectory() as name:
        write_configurations(Path(name))
        every = smoke_cases() if device.kind == "cpu" else [Case("ops", line, Aim("fill", 100)) for line in LINES]
        cases = [case for case in every if asked.only in case.line]
        jobs = (Job(case.line, partial(observe, case.recipe(Path(name)), device), SECONDS) for case in cases)
        for outcome in run_forked(jobs, 1, deadline):
            if outcome.failure is not None:
                failed = True
                print(f"{outcome.name}: FAILED: {outcome.failure}", flush=True)
                continue
            row = with_predictions(outcome.value, device, calibration)
            print(f"{said(outcome.name, row)} ({outcome.seconds:.0f} s)", flush=True)
            write({outcome.name: row}, facts)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Predicted memory and step time against measured ones, over recipes of every technique on a CUDA device.

Each case is planned first, on the CPU; the plan sets how much memory the case is given. Then it trains a few steps in
a process of its own. Rows are added to results/plan_vs_gpu.jsonl as they come, so that a run goes on where the one
before it ended, and results/plan_vs_gpu-GPU.json sums them up.

Run: python benchmarks/plan_vs_gpu.py [--part 1/3] [--minutes 7.5] [--only WORD]
     python benchmarks/plan_vs_gpu.py --plan h200    plans ahead for a card, with no GPU, in build/gpu_plans/
     python benchmarks/plan_vs_gpu.py --again        plans what was measured once more, with no GPU, by what has become
                                                     known since: the card's calibration, and a source that was mended
     python benchmarks/plan_vs_gpu.py --device cpu   a few tiny cases, anywhere; their memory is not measured
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def part(text: str) -> tuple[int, int]:
    """`1/3` as numbers."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: write a part as 1/3, 2/3 or 3/3")
    return int(number), int(count)


@contextmanager
def cuda_unopened() -> Iterator[None]:
    """Imports that open no CUDA, which would not survive a fork.

    Where a GPU is asked for, the driver's library answers; and torchao, which asks for its capability as it is imported
    (by transformers, where it is installed), waits for the child that needs it.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    loaded = "torchao" in sys.modules
    modules: dict[str, Any] = sys.modules
    if not loaded:
        modules["torchao"] = None  # as if it were not installed
    try:
        yield
    finally:
        if not loaded:
            del modules["torchao"]


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0; 1 where a goal is missed, or a tiny case failed; 2 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=part, default=(1, 1), help="which of how many parts of the cases, such as 1/3")
    parser.add_argument("--minutes", type=float, default=7.5, help="nothing runs for longer")
    parser.add_argument("--only", default="", help="cases whose name or group has this in it")
    parser.add_argument("--plain", action="store_true", help="leave out what compiles, which takes longest")
    parser.add_argument("--plan", metavar="GPU", help="plan for a card that another machine has; needs no GPU")
    parser.add_argument("--again", action="store_true", help="plan the measured cases again; needs no GPU")
    parser.add_argument("--smoke", action="store_true", help="a few tiny cases instead")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="the CPU runs the tiny cases alone")
    parser.add_argument("--rows", type=Path, help="where the rows are kept: a file beside which the summary goes")
    parser.add_argument("--workers", type=int, help="plans made at once")
    asked = parser.parse_args(arguments)
    cores = os.cpu_count() or 1
    workers = asked.workers or (cores if asked.plan or asked.again else max(cores - 2, 1))
    with cuda_unopened():
        import record
        from gpu_runs import plan_ahead, run, run_again
        from tightfit.errors import RecipeError, Refused
    rows = asked.rows or record.RESULTS / "plan_vs_gpu.jsonl"
    try:
        if asked.plan:
            plan_ahead(asked.plan, workers, asked.only)
            return 0
        if asked.again:
            run_again(rows, workers)
            return 0
        summary = run(
            rows, on_cpu=asked.device == "cpu", smoke=asked.smoke, part=asked.part, only=asked.only,
            compiles=not asked.plain, seconds=60 * asked.minutes, workers=workers,
        )
    except (Refused, RecipeError) as reason:
        print(f"plan_vs_gpu: {reason}", file=sys.stderr)
        return 2
    if asked.smoke or asked.device == "cpu":
        return 1 if summary["failed"] else 0
    return 1 if any(goal["met"] is False for goal in summary["goals"]) else 0


def _stop(number: int, frame: Any) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # children are ended with this process
    sys.exit(main())

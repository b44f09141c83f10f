"""Predicted memory against what the processor's allocator really hands out, at three peaks of every case.

Truth: torch.profiler's allocation events of two real steps, from the construction of the model on. The peaks are those
of the forward passes, the backward passes and the optimizer step, the largest over both steps.

Run: python benchmarks/plan_vs_cpu.py [--only TEXT]
With TEXT, only the cases whose name holds it run, and nothing is recorded. Ends with status 1 where a case errs by more
than 0.2 %, or fails. Cases that are known to miss are recorded beside the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
import warnings
from typing import Any

import torch

import record
from cpu_cases import Case, cases, cases_beside
from cpu_truth import PHASES, measured_peaks
from random_global_batches import random_global_batch
from tightfit.backends.pytorch.batch import TensorGlobalBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.simulate.predict import predict
from tightfit.devices import Device
from tightfit.tasks import DOCUMENTS_A_ROW

CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 40)
BOUND = 0.002
"""The largest error of any peak of any case, as a share of it."""
CLEARLY = 1.1
"""A case is bound by activations where its backward peak is so many times the optimizer's."""


def compare(case: Case) -> dict[str, Any]:
    """One case: bytes predicted and measured at each peak."""
    recipe, make = case.recipe(), case.model_factory()

    def global_batches(build: Build) -> list[TensorGlobalBatch]:
        documents = case.documents or DOCUMENTS_A_ROW
        return [random_global_batch(build.recipe, build.task, build.facts, seed, documents) for seed in range(2)]

    torch.manual_seed(0)
    measured = measured_peaks(recipe, CPU, global_batches, make)
    started = time.perf_counter()
    trace = predict(recipe, CPU, None if make is None else make())
    seconds = time.perf_counter() - started
    peaks = {
        phase: max(trace.peak(span.start, span.stop)[1] for span in trace.spans if span.name == phase)
        for phase in PHASES
    }
    errors = {phase: peaks[phase] / measured[phase] - 1 for phase in PHASES}
    return {
        "case": case.name, "measured": measured, "predicted": peaks,
        "error": {phase: round(error, 7) for phase, error in errors.items()},
        "activation_bound": measured["backward"] > CLEARLY * measured["optimizer"],
        "predicted_in": round(seconds, 2),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = sorted(abs(error) for row in rows for error in row["error"].values())
    return {
        "cases": len(rows),
        "architectures": len({row["case"].split()[0].removesuffix("-deep") for row in rows}),
        "activation_bound": sum(row["activation_bound"] for row in rows),
        "median": statistics.median(errors),
        "p95": errors[int(0.95 * (len(errors) - 1))],
        "worst": errors[-1],
        "worst_case": max(rows, key=lambda row: max(map(abs, row["error"].values())))["case"],
        "bound": BOUND,
    }


def beside() -> list[dict[str, Any]]:
    """Figures recorded beside the cases, told as they come."""
    rows = []
    for case in cases_beside():
        rows.append(row := compare(case))
        print(f"beside: {case.name}: " + "  ".join(f"{phase} {error:+.4%}" for phase, error in row["error"].items()),
              flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="predicted against allocated memory on the CPU")
    parser.add_argument("--only", default="", help="run the cases whose name holds this, and record nothing")
    parser.add_argument("--beside", action="store_true",
                        help="measure anew what is recorded beside the cases, and keep the rest of the record")
    asked = parser.parse_args()
    only = asked.only
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if asked.beside:
        kept = json.loads((record.RESULTS / "plan_vs_cpu.json").read_text())
        record.write("plan_vs_cpu", {"summary": kept["summary"], "rows": kept["rows"], "beside": beside()})
        return 0
    rows: list[dict[str, Any]] = []
    chosen = [case for case in cases() if only in case.name]
    failed: list[str] = []
    for number, case in enumerate(chosen, 1):
        try:
            row = compare(case)
        except Exception as error:  # the others are to be seen as well
            failed.append(case.name)
            print(f"{number}/{len(chosen)} {case.name}: {type(error).__name__}: {error}", flush=True)
            continue
        rows.append(row)
        errors = "  ".join(f"{phase} {error:+.4%}" for phase, error in row["error"].items())
        print(f"{number}/{len(chosen)} {case.name}: {errors}", flush=True)
        gc.collect()
    totals = {**summary(rows), "failed": failed}
    print(f"{totals['cases']} cases of {totals['architectures']} architectures, {totals['activation_bound']} bound by "
          f"activations: median {totals['median']:.4%}, p95 {totals['p95']:.4%}, worst {totals['worst']:.4%} "
          f"({totals['worst_case']}; bound {BOUND:.1%}), {len(failed)} failed")
    if not only:
        record.write("plan_vs_cpu", {"summary": totals, "rows": rows, "beside": beside()})
    return int(bool(failed) or totals["worst"] > BOUND)


if __name__ == "__main__":
    sys.exit(main())

"""Steps of models that are larger than the memory they are given, run on a CUDA device beside their plans: the same
losses and weights as the resident step to the last bit, memory of the device and the host, and speed.

Each case runs in a process of its own. Rows are added to results/beyond_gpu.jsonl as they come, so that a run goes on
where the one before it ended; results/beyond_gpu-GPU.json sums them up.

Run: python benchmarks/beyond_gpu.py [--minutes 7.5] [--only WORD]
     python benchmarks/beyond_gpu.py --plan h200    plans ahead for a card, with no GPU, in build/gpu_plans/; what was
                                                    measured on it is summed up beside the new plans
     python benchmarks/beyond_gpu.py --dry FOLDER   the same way on the processor, with a tiny model and no limits
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from plan_vs_gpu import cuda_unopened

with cuda_unopened():
    import psutil
    import torch

    import gpu_truth
    import record
    from allocator_recordings import recording_of, write_recording
    from beyond_cases import CASES, Case, Row, dry_cases, key_of, planned
    from forking import Job, Outcome, run_forked
    from gpu_plans import GpuPlans, card_name
    from gpu_predictions import device_of
    from gpu_runs import calibration_of, on_gpu
    from random_global_batches import random_global_batch
    from tightfit.backends.pytorch.assembly import assemble
    from tightfit.backends.pytorch.batch import TensorGlobalBatch
    from tightfit.backends.pytorch.determinism import use_deterministic_matmuls
    from tightfit.backends.pytorch.step import Step
    from tightfit.devices import GIB, Device, find_device
    from tightfit.errors import RecipeError, Refused
    from tightfit.ladder.rows import append
    from tightfit.recipe import Recipe

NAME = "beyond_gpu"
WARM_UP, TIMED, EXACT = 2, 3, 4
"""Steps before time is taken, those that it is taken of, and those whose losses and weights are compared."""
LONG = 8.0
"""Seconds of a step of which one fewer is timed."""
PUBLISHED = (
    {"who": "torchtune, Llama 3.1 8B", "gpu": "RTX 4090", "device_gib": 18.9, "tokens_per_second": 1650,
     "without": "accumulation and clipping"},
    {"who": "LLMQ, Qwen2.5 7B", "gpu": "H100", "tokens_per_second": 13900, "tokens": 524288},
    {"who": "LLMQ, Qwen2.5 7B", "gpu": "RTX 4090", "tokens_per_second": 2800, "tokens": 524288},
    {"who": "LLMQ, Qwen2.5 7B", "gpu": "RTX 5060 Ti 16GB", "tokens_per_second": 889, "tokens": 524288},
)  # fmt: skip
"""Full fine-tuning in bf16, as their authors published it."""

def plan_ahead(gpu: str, folder: Path) -> None:
    """Plan every run for a card of the catalogue, and keep the plans for a machine that has it; where such a machine
    has measured it already, sum that up beside them."""
    device = find_device(gpu)
    plans = GpuPlans(NAME, device)
    named = {run.name: (case, run) for case in CASES for run in case.runs}
    path = folder / f"{NAME}.jsonl"
    measured_on = {name for row in record.rows_of(path) if card_name(name := row["gpu"]) == device.name}
    calibration = next(filter(None, (calibration_of(replace(device, name=name)) for name in measured_on)), None)
    jobs = (Job(name, partial(planned, case, run, device, calibration), 900.0) for name, (case, run) in named.items())
    for outcome in run_forked(jobs):
        if outcome.failure is None:
            plans.add(key_of(*named[outcome.name]), outcome.value)
        print(outcome.name, outcome.failure or json.dumps(outcome.value["predicted"]), flush=True)
    for name in measured_on:
        rows = kept_rows(path, name)
        again = {run: {**row, **plans.newest.get(key_of(*named[run]), {})} for run, row in rows.items() if run in named}
        print(record.write(f"{NAME}-{record.slug(name)}", {"gpu": name, **summary(again)}, folder))


def run_case(case: Case, plans: Mapping[str, Row], device: Device, path: Path, on_cpu: bool) -> None:
    """Measure what a case has, in this process. plans: of its runs that are to be measured, by name. Each run becomes a
    row as it ends."""
    runs = [run for run in case.runs if run.name in plans]
    recipe = Recipe.from_dict(plans[runs[0].name]["recipe"])
    if on_cpu:
        torch.set_num_threads(1)  # a forked process cannot use its parent's threads
    else:
        if recipe.deterministic:
            use_deterministic_matmuls()
        gpu_truth._set_up(None, bool(recipe.expandable_segments))
        if case.recorded:
            torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)
    before, began = psutil.Process().memory_info().rss, time.monotonic()
    build = assemble(recipe, device, torch.device("cpu" if on_cpu else "cuda"))
    step = Step(build, inspect=False)
    made = time.monotonic() - began
    with build.process_settings():
        for run in runs:
            if not on_cpu:
                limit_memory(run.gib)
            if run.in_turn:
                copies_in_turn()
            plan = plans[run.name]
            batches = [random_global_batch(Recipe.from_dict(plan["recipe"]), build.task, build.facts, seed)
                       for seed in range(2)]
            found = losses(step, batches) if run.exact else measured(step, batches, on_cpu)
            if not run.exact:
                found |= {"made_seconds": round(made, 1), "host": psutil.Process().memory_info().rss - before}
            if case.recorded and not on_cpu:
                keep_recording(run.name, path.with_name("allocator_recordings"))
            append(path, {"case": run.name, "gpu": device.name, **plan, "measured": found})
            print(run.name, json.dumps(found), flush=True)


def limit_memory(gib: float | None) -> None:
    """Give the allocator so much, and let it begin anew."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else gib * GIB / total)
    torch.cuda.reset_peak_memory_stats()


def keep_recording(name: str, folder: Path) -> None:
    """Write what the allocator did since the process began: where a plan asks for memory otherwise, it shows."""
    gpu = torch.cuda.get_device_name()
    origin = {"run": name, "torch": torch.__version__, "device": gpu}
    recording = recording_of(torch.cuda.memory._snapshot(), origin=origin, limit=None, statistics=None)
    write_recording(folder / f"{record.slug(gpu)}-{record.slug(name)}.json.gz", recording)


def copies_in_turn() -> None:
    """Make each copy where it is asked for, among the computation."""
    from tightfit.backends.pytorch.techniques.by_block.transfers import Transfers

    def run(self: Any, copy: Any, source: torch.Tensor, after: Any) -> None:
        copy.target.copy_(source)

    Transfers._run = run  # type: ignore[method-assign]  # of a process that ends with the case


def losses(step: Step, batches: Sequence[TensorGlobalBatch]) -> Row:
    """Losses, norms and weights of a few steps, to the last bit."""
    rate = step.build.recipe.learning_rate
    found = [step(batches[n % 2], rate).read() for n in range(EXACT)]
    step.update.flush()
    return {"losses": [each.loss.sum.hex() for each in found],
            "norms": [None if each.grad_norm is None else each.grad_norm.hex() for each in found],
            "weights": digest(step)}


def measured(step: Step, batches: Sequence[TensorGlobalBatch], on_cpu: bool) -> Row:
    """Seconds of steps, and peaks of memory in bytes."""
    recipe, began = step.build.recipe, time.perf_counter()
    first = 1 if step.optimizer.state else WARM_UP
    for number in range(first):
        step(batches[number % 2], recipe.learning_rate).read()
    warm = time.perf_counter() - began
    seconds = gpu_truth._timed(step, [batches[n % 2] for n in range(TIMED - (warm > first * LONG))], recipe)
    step.update.flush()
    row: Row = {"seconds": record.quantiles(seconds), "warm_up_seconds": warm}
    if on_cpu:
        return row
    stats = torch.cuda.memory_stats()
    return {**row, "peak_allocated": stats["allocated_bytes.all.peak"], "retries": stats["num_alloc_retries"],
            "peak_reserved": stats["reserved_bytes.all.peak"]}


def digest(step: Step) -> str:
    """A hash of all weights."""
    found = hashlib.blake2b()
    for name, weight in sorted(step.build.model.state_dict().items()):
        found.update(name.encode())
        found.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def summary(rows: Mapping[str, Row]) -> Row:
    """What the rows come to: whether streamed steps are the resident ones, and each case beside its plan."""
    told = {name: row["measured"] for name, row in rows.items() if row.get("measured")}
    ours, again, resident = (told.get(f"exact: {name}") for name in ("streamed", "resident again", "resident"))
    table = []
    for name, row in rows.items():
        found, told_before = row.get("measured"), row.get("predicted")
        if not found or not told_before or "seconds" not in found:
            continue
        seconds = found["seconds"]["median"]
        table.append({
            "case": name, "tokens": row["tokens"], "tokens_per_second": round(row["tokens"] / seconds),
            "step_seconds": seconds, "mfu": round(told_before["mfu"] * told_before["step_seconds"] / seconds, 4),
            "of_predicted": {
                what: round(value / told_before[key], 4)
                for what, key, value in (("seconds", "step_seconds", seconds), *(
                    (key, key, found.get(key)) for key in ("peak_allocated", "peak_reserved", "host")))
                if value and told_before[key]},
        })  # fmt: skip
    return {
        "streamed_is_resident": None if ours is None or resident is None else ours == resident,
        "resident_is_itself": None if again is None or resident is None else again == resident,
        "rows": table, "failures": {n: row["failure"] for n, row in rows.items() if row.get("failure")},
        "published": PUBLISHED,
    }  # fmt: skip


def kept_rows(path: Path, device: str) -> dict[str, Row]:
    """The rows of a device that runs before left, the newest of each."""
    return {row["case"]: row for row in record.rows_of(path) if row["gpu"] == device}


def left_to_do(cases: Iterable[Case], rows: Mapping[str, Row], only: str) -> list[Case]:
    """The cases with those of their runs that have no measurement yet."""
    left = (replace(case, runs=tuple(run for run in case.runs if only in run.name
                                     and "measured" not in rows.get(run.name, {}))) for case in cases)
    return [case for case in left if case.runs]


def measure_all(cases: list[Case], device: Device, path: Path, on_cpu: bool, deadline: float) -> None:
    """Plan what is not planned yet, and measure one case after another; a case that fails leaves a row that says so."""
    plans, calibration = {} if on_cpu else GpuPlans(NAME, device).newest, calibration_of(device)
    for case in cases:
        made = {run.name: plans[key] for run in case.runs if (key := key_of(case, run)) in plans}
        jobs = (Job(run.name, partial(planned, case, run, device, calibration), case.seconds) for run in case.runs
                if run.name not in made)
        failures: list[Outcome] = []
        for outcome in run_forked(jobs, len(case.runs), deadline):
            if outcome.failure is None:
                made[outcome.name] = outcome.value
            else:
                failures.append(outcome)
        if made:
            job = Job(case.runs[0].name, partial(run_case, case, made, device, path, on_cpu), case.seconds)
            failures += [outcome for outcome in run_forked([job], 1, deadline) if outcome.failure is not None]
        for failed in failures:
            append(path, {"case": failed.name, "gpu": device.name, "failure": failed.failure})
            print(f"{failed.name}: FAILED: {failed.failure}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0; 1 where a case failed, or streamed steps are not the resident ones; 2 without a device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.5, help="nothing runs for longer")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--plan", metavar="GPU", help="plan for a card that another machine has; needs no GPU")
    parser.add_argument("--dry", type=Path, metavar="FOLDER", help="try it out on the processor, and write here")
    asked = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * asked.minutes
    folder = asked.dry or record.RESULTS
    try:
        if asked.plan:
            plan_ahead(asked.plan, folder)
            return 0
        device = find_device("h200") if asked.dry else device_of(on_gpu())
    except (Refused, RecipeError) as reason:
        print(f"beyond_gpu: {reason}", file=sys.stderr)
        return 2
    path = folder / f"{NAME}.jsonl"
    cases = left_to_do(dry_cases() if asked.dry else CASES, kept_rows(path, device.name), asked.only)
    measure_all(cases, device, path, asked.dry is not None, deadline)
    told = summary(kept_rows(path, device.name))
    print(json.dumps({name: told[name] for name in ("streamed_is_resident", "resident_is_itself", "rows")}, indent=1))
    print(record.write(f"{NAME}-{record.slug(device.name)}", {"gpu": device.name, **told}, folder))
    return 1 if told["failures"] or told["streamed_is_resident"] is False else 0


if __name__ == "__main__":
    sys.exit(main())

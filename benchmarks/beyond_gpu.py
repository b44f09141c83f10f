"""Steps of models that are larger than the memory they are given, run on a CUDA device beside their plans: the same
losses and weights as the resident step to the last bit, memory of the device and the host, and speed.

Each case runs in a process of its own. Rows are added to results/beyond_gpu.jsonl as they come, so that a run goes on
where the one before it ended; results/beyond_gpu.json sums them up.

Run: python benchmarks/beyond_gpu.py [--minutes 7.5] [--only WORD]
     python benchmarks/beyond_gpu.py --dry FOLDER   the same way on the processor, with a tiny model and no limits
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from plan_vs_gpu import cuda_unopened

with cuda_unopened():
    import psutil
    import torch

    import beyond
    import gpu_truth
    import record
    import tightfit
    from forking import Job, run_forked
    from gpu_predictions import device_of
    from gpu_runs import calibration_of, on_gpu
    from random_global_batches import random_global_batch
    from tightfit.backends.pytorch.assembly import assemble
    from tightfit.backends.pytorch.backend import PytorchBackend
    from tightfit.backends.pytorch.step import Step
    from tightfit.devices import GIB, Device, find_device
    from tightfit.errors import Refused
    from tightfit.planning.defaults import resolve
    from tightfit.planning.estimate import estimate
    from tightfit.planning.standard_tools import standard_tools
    from tightfit.recipe import Recipe

Row = dict[str, Any]
WARM_UP, TIMED, EXACT = 2, 3, 4
"""Steps before time is taken, those that it is taken of, and those whose losses and weights are compared."""
PUBLISHED = (
    {"who": "torchtune, Llama 3.1 8B", "gpu": "RTX 4090", "device_gib": 18.9, "tokens_per_second": 1650,
     "without": "accumulation and clipping"},
    {"who": "LLMQ, Qwen2.5 7B", "gpu": "H100", "tokens_per_second": 13900, "tokens": 524288},
    {"who": "LLMQ, Qwen2.5 7B", "gpu": "RTX 4090", "tokens_per_second": 2800, "tokens": 524288},
    {"who": "LLMQ, Qwen2.5 7B", "gpu": "RTX 5060 Ti 16GB", "tokens_per_second": 889, "tokens": 524288},
)  # fmt: skip
"""Full fine-tuning in bf16, as their authors published it."""

STREAMED = {**beyond.RESIDENT, **beyond.STREAMED}
SHORT = {"model_overrides": {"num_hidden_layers": 3}, "precision": {"name": "bf16-pure", "rounding": "kahan"},
         "batch_size": 3, "seq_len": 1024, "max_grad_norm": 0.5}
TINY = {"model": "llama-3.2-1b", "vocab_size": 512, "seq_len": 64, "model_overrides": {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "tie_word_embeddings": False}}


@dataclass(frozen=True)
class Case:
    """A recipe to run, as changes of `beyond.PINNED`. gib: what the allocator may reserve; None for all there is.
    exact: tell losses and weights instead of times. in_turn: nothing is copied while the device computes.
    planned: host memory that a plan for `gib` has, which fills in what the fields leave open."""

    name: str
    fields: Mapping[str, Any]
    gib: float | None = None
    exact: bool = False
    in_turn: bool = False
    planned: str | None = None
    seconds: float = field(default=240.0, kw_only=True)


CASES = (
    Case("exact: resident", {**beyond.RESIDENT, **SHORT}, exact=True),
    Case("exact: resident again", {**beyond.RESIDENT, **SHORT}, exact=True),
    Case("exact: streamed", {**STREAMED, **SHORT}, exact=True),
    Case("8B resident, 32k tokens", {**beyond.RESIDENT, "batch_size": 8}),
    Case("8B in 16 GiB, 32k tokens", {**STREAMED, "batch_size": 8}, 16),
    Case("8B in 12 GiB, 64k tokens", {**STREAMED, "batch_size": 16}, 12),
    Case("8B in 16 GiB, 32k tokens, copies in turn", {**STREAMED, "batch_size": 8}, 16, in_turn=True),
    Case("8B as planned for 24 GiB, 32k tokens", {"batch_size": 8}, 24, planned="100GiB"),
    Case("32B as planned, 32k tokens", {"batch_size": 8, **beyond.EXTREMES[1][2]}, planned="110GiB", seconds=440),
    Case("8B in 16 GiB, 128k tokens", {**STREAMED, "batch_size": 32}, 16),
)  # fmt: skip
"""What tells most comes first."""


def dry_cases() -> Iterator[Case]:
    """Tiny ones, that any machine runs in seconds."""
    for case in CASES:
        if case.planned is None:
            tiny = {**case.fields, **TINY, "batch_size": min(case.fields["batch_size"], 4)}
            yield Case(case.name, tiny, exact=case.exact, in_turn=case.in_turn)


def recipe_of(case: Case, device: Device) -> Recipe:
    """The case's recipe, resolved. Raises Refused where no plan fits."""
    values = {**beyond.PINNED, "pretrained": False, **case.fields}
    if case.planned is None:
        return resolve(Recipe.from_dict(values), device)
    chosen = tightfit.plan(values["model"], {**values, "compile": "off"}, gpu=device.name, host_memory=case.planned,
                           gpu_memory=f"{case.gib}GiB" if case.gib else None).chosen
    if chosen is None:
        raise Refused(f"{case.name}: no plan fits")
    return chosen.recipe


def run_case(case: Case, device: Device, on_cpu: bool) -> Row:
    """Plan a case and run it, in this process."""
    recipe = recipe_of(case, device)
    tools = standard_tools(PytorchBackend(), calibration_of(device))
    predicted = estimate(PytorchBackend().predict(recipe, device), recipe, device, tools)
    row: Row = {"recipe": recipe.to_dict(), "tokens": recipe.batch_size * recipe.seq_len, "predicted": {
        "step_seconds": predicted.time.step_seconds, "peak_allocated": predicted.memory.peak_allocated,
        "peak_reserved": predicted.memory.peak_reserved, "host": sum(predicted.memory.host_by_category.values()),
    }}  # fmt: skip
    if on_cpu:
        torch.set_num_threads(1)  # a forked process cannot use its parent's threads
    else:
        if case.exact:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        gpu_truth._set_up(None if case.gib is None else round(case.gib * GIB), bool(recipe.expandable_segments))
    if case.exact:
        torch.use_deterministic_algorithms(True, warn_only=True)
    if case.in_turn:
        copies_in_turn()
    return {**row, "measured": measured(case, recipe, device, on_cpu)}


def copies_in_turn() -> None:
    """Make each copy where it is asked for, among the computation."""
    from tightfit.backends.pytorch.techniques.by_block.transfers import Transfers

    def run(self: Any, copy: Any, source: torch.Tensor, after: Any) -> None:
        copy.target.copy_(source)

    Transfers._run = run  # type: ignore[method-assign]  # of a process that ends with the case


def measured(case: Case, recipe: Recipe, device: Device, on_cpu: bool) -> Row:
    """What steps of a recipe take: seconds, and peaks of memory in bytes; or, for an exact case, their losses."""
    before = psutil.Process().memory_info().rss
    build = assemble(recipe, device, torch.device("cpu" if on_cpu else "cuda"))
    batches = [random_global_batch(recipe, build.task, build.facts, seed) for seed in range(2)]
    step = Step(build, inspect=False)
    made = time.perf_counter()
    with build.session():
        if case.exact:
            found = [step(batches[n % 2], recipe.learning_rate).read() for n in range(EXACT)]
            step.update.flush()
            return {"losses": [each.loss.sum.hex() for each in found],
                    "norms": [None if each.grad_norm is None else each.grad_norm.hex() for each in found],
                    "weights": digest(step)}
        for number in range(WARM_UP):
            step(batches[number % 2], recipe.learning_rate).read()
        warm = time.perf_counter() - made
        seconds = gpu_truth._timed(step, [batches[n % 2] for n in range(TIMED)], recipe)
        step.update.flush()
    row = {"seconds": record.quantiles(seconds), "warm_up_seconds": warm,
           "host": psutil.Process().memory_info().rss - before}
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
    measured = {name: row["measured"] for name, row in rows.items() if row.get("measured")}
    ours, again, resident = (measured.get(f"exact: {name}") for name in ("streamed", "resident again", "resident"))
    table = []
    for name, row in rows.items():
        found, planned = row.get("measured"), row.get("predicted")
        if not found or not planned or "seconds" not in found:
            continue
        seconds = found["seconds"]["median"]
        table.append({
            "case": name, "tokens": row["tokens"], "tokens_per_second": round(row["tokens"] / seconds),
            "step_seconds": seconds, "of_predicted": {
                what: round(value / planned[key], 4)
                for what, key, value in (("seconds", "step_seconds", seconds), *(
                    (key, key, found.get(key)) for key in ("peak_allocated", "peak_reserved", "host")))
                if value and planned[key]},
        })  # fmt: skip
    return {
        "streamed_is_resident": None if ours is None or resident is None else ours == resident,
        "resident_is_itself": None if again is None or resident is None else again == resident,
        "rows": table, "failures": {n: row["failure"] for n, row in rows.items() if row.get("failure")},
        "published": PUBLISHED,
    }  # fmt: skip


def kept_rows(path: Path, device: str) -> dict[str, Row]:
    """The rows of a device that a run before left, the newest of each case."""
    found: dict[str, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if row["gpu"] == device:
            found[row["case"]] = row
    return found


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0; 1 where a case failed, or streamed steps are not the resident ones; 2 without a device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.5, help="nothing runs for longer")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--dry", type=Path, metavar="FOLDER", help="try it out on the processor, and write here")
    asked = parser.parse_args(arguments)
    try:
        device = find_device("h200") if asked.dry else device_of(on_gpu())
    except Refused as reason:
        print(f"beyond_gpu: {reason}", file=sys.stderr)
        return 2
    folder = asked.dry or record.RESULTS
    path = folder / "beyond_gpu.jsonl"
    rows = kept_rows(path, device.name)
    cases = {case.name: case for case in (dry_cases() if asked.dry else CASES)
             if asked.only in case.name and "measured" not in rows.get(case.name, {})}
    jobs = (Job(case.name, partial(run_case, case, device, asked.dry is not None), case.seconds)
            for case in cases.values())
    for outcome in run_forked(jobs, 1, time.monotonic() + 60 * asked.minutes):
        row = outcome.value or {"failure": outcome.failure}
        rows[outcome.name] = {"case": outcome.name, "gpu": device.name, "wall": round(outcome.seconds, 1), **row}
        with path.open("a") as file:
            file.write(json.dumps(rows[outcome.name]) + "\n")
        print(outcome.name, json.dumps(row.get("measured") or row), flush=True)
    found = summary(rows)
    print(json.dumps({name: found[name] for name in ("streamed_is_resident", "resident_is_itself", "rows")}, indent=1))
    print(record.write("beyond_gpu", {"gpu": device.name, **found}, folder))
    return 1 if found["failures"] or found["streamed_is_resident"] is False else 0


if __name__ == "__main__":
    sys.exit(main())

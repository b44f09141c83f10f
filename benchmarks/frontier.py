"""Throughput against memory: tightfit's plan and each peer's best flags, with the card cut down to a budget.

For each budget the plan chooses (numerics kept, and free to change them), and a peer is tried at every combination of
its own flags below, micro-batches from the largest down until one fits; its fastest counts. Global batch, model, data
and steps are the same for all. Rows are kept as they come (results/frontier-MODEL-DEVICE.jsonl), so that a call goes
on where the last one stopped; results/frontier-MODEL-DEVICE.json and .png say what came out.
Run: python benchmarks/frontier.py [--budget 24GB ...] [--peer hf-trainer ...] [--model gpt2-medium] [--minutes 7.5]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

import record
from record_ladders import device_slug
from tightfit.devices import parse_memory
from tightfit.ladder.catalogue import AUTO
from tightfit.ladder.climbing import climb
from tightfit.ladder.climbs import Asked
from tightfit.ladder.rows import OURS, RESULTS, Machine, Measured, read
from tightfit.ladder.rungs import PLAIN, Ladder, Rung

BUDGETS = ("8GB", "12GB", "16GB", "24GB", "40GB", "80GB")
BATCH, SEQ_LEN = 64, 1024
MICRO_BATCHES = (64, 32, 16, 8, 4, 2, 1)
BASE: dict[str, Any] = {
    **PLAIN, "data": {"source": "dummy", "samples": 512}, "seq_len": SEQ_LEN, "batch_size": BATCH,
    "micro_batch_size": 1, "attention": "sdpa", "loading": {"workers": 2},
}
PLANS = (
    Rung(name="the plan", changes=AUTO),
    Rung(name="the plan, numerics free", changes={**AUTO, "allow_numerics": True}),
)
FLAGS: dict[str, tuple[Any, ...]] = {
    "precision": ({"name": "bf16", "tf32": True},),
    "optimizer": ({"name": "adamw", "implementation": "fused"}, "adafactor"),
    "checkpointing": ("none", "every-block"),
    "compile": ("off", "whole"),
}
"""What a peer's script sets by hand."""


def combinations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every combination of flags, with a name."""
    for values in product(*FLAGS.values()):
        changes = dict(zip(FLAGS, values, strict=True))
        words = [value["name"] if isinstance(value, dict) else value for value in values]
        yield ", ".join(words), changes


def explored(model: str, budget: str, peers: list[str], folder: Path, until: float) -> None:
    """Run what has no row yet at a budget, as far as the time goes."""
    memory = parse_memory(budget)
    machine: Machine | None = None

    def run(rungs: list[Rung], runner: str) -> list[Measured | None]:
        nonlocal machine
        ladder = Ladder(name=f"frontier-{model}", title=model, base={**BASE, "model": model}, rungs=tuple(rungs))
        asked = Asked(ladder=ladder, scale="full", folder=folder, runners=(runner,), warm_up=2, steps=5, limit=240.0,
                      memory=memory, until=until, predicts=runner == OURS)
        done = climb(asked, lambda text: print(f"{budget}: {text}", flush=True), machine)
        machine = done.machine
        return [done.newest(rung, runner) for rung in rungs]

    run(list(PLANS), OURS)
    for peer, (words, changes) in product(peers, combinations()):
        for micro in MICRO_BATCHES:
            rung = Rung(name=f"{words}, micro-batch {micro}", changes={**changes, "micro_batch_size": micro})
            (row,) = run([rung], peer)
            if row is None or row.status != "out-of-memory":
                break


def summary(folder: Path) -> list[dict[str, Any]]:
    """The fastest row of each budget and runner."""
    best: dict[tuple[int, str], Measured] = {}
    for row in read(folder / RESULTS).measured:
        if row.status == "done" and row.memory is not None:
            place = (row.memory, row.rung if row.runner == OURS else row.runner)
            if place not in best or row.samples_per_second > best[place].samples_per_second:
                best[place] = row
    return [{"budget_bytes": memory, "who": who, "rung": row.rung, "tokens_per_second": row.tokens / row.median_seconds,
             "driver_bytes": row.driver_bytes, "seconds": record.quantiles(list(row.seconds)), "recipe": row.recipe}
            for (memory, who), row in sorted(best.items())]


def draw(points: list[dict[str, Any]], path: Path, title: str) -> None:
    """Throughput against the budget, a line for each runner."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for who in dict.fromkeys(point["who"] for point in points):
        mine = [point for point in points if point["who"] == who]
        axes.plot([point["budget_bytes"] / 2**30 for point in mine], [point["tokens_per_second"] for point in mine],
                  marker="o", label=who)
    axes.set(xlabel="memory budget, GiB", ylabel="tokens/s", title=title, ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", action="append", choices=BUDGETS)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--model", default="gpt2-medium")
    parser.add_argument("--minutes", type=float, default=7.5)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("a budget cuts a GPU down, and torch sees no CUDA device here")
    until = time.monotonic() + 60 * asked.minutes
    name = f"frontier-{asked.model}-{device_slug()}"
    folder, kept = Path("ladders") / name, record.RESULTS / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if kept.exists():
        shutil.copy(kept, folder / RESULTS)
    try:
        for budget in asked.budget or BUDGETS:
            explored(asked.model, budget, asked.peer or ["hf-trainer"], folder, until)
    finally:
        if (folder / RESULTS).exists():
            shutil.copy(folder / RESULTS, kept)
    points = summary(folder)
    record.write(name, {"model": asked.model, "seq_len": SEQ_LEN, "batch_size": BATCH, "points": points})
    draw(points, record.RESULTS / f"{name}.png", f"{asked.model}, {SEQ_LEN} tokens, global batch {BATCH}")


if __name__ == "__main__":
    main()

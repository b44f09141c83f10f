"""Throughput against memory: tightfit's plan and each peer's best flags, with the card cut down to a budget.

For each budget the plan chooses (numerics kept, and free to change them), and a peer is tried at every combination of
its own flags below, each at the largest micro-batch that fits, looked for from that of the flags before; its fastest
counts. Global batch, model, data and steps are the same for all. Rows are kept as they come
(results/frontier-MODEL-DEVICE.jsonl), so that a call goes on where the last one stopped;
results/frontier-MODEL-DEVICE.json and .png say what came out.
Run: python benchmarks/frontier.py [--budget 24GB ...] [--peer hf-trainer ...] [--model gpt2-medium] [--minutes 7.5]
     python benchmarks/frontier.py --plan h200    plans ahead for a card, with no GPU, in build/gpu_plans/
     python benchmarks/frontier.py --dry FOLDER   the same way on the processor in minutes, with a tiny model and fewer
flags; nothing cuts it down, so that what took more than a budget counts as out of memory
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import record
import tightfit
from gpu_plans import GpuPlans
from record_ladders import minutes
from tightfit.devices import MIB, Device, find_device, listed_device, parse_memory
from tightfit.ladder.catalogue import AUTO
from tightfit.ladder.rows import OURS, RESULTS, Machine, Measured, read
from tightfit.ladder.run import LadderRun, run_rungs, this_machine
from tightfit.ladder.rungs import PLAIN_FIELDS, Ladder, Rung
from tightfit.recipe import Recipe

BUDGETS = ("8GB", "12GB", "16GB", "24GB", "40GB", "80GB")
BATCH, SEQ_LEN = 64, 1024
MICRO_BATCHES = (64, 32, 16, 8, 4, 2, 1)
BASE: dict[str, Any] = {
    **PLAIN_FIELDS, "data": {"source": "dummy", "samples": 512}, "seq_len": SEQ_LEN, "batch_size": BATCH,
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
"""Settings that a peer's script makes by hand."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """The grid that is explored. budgets: bytes, by their words. cuts: whether the card is cut down to them."""

    base: Mapping[str, Any]
    flags: Mapping[str, tuple[Any, ...]]
    micro_batches: tuple[int, ...]
    budgets: Mapping[str, int]
    cuts: bool = True


def on_gpu(model: str, budgets: list[str]) -> Study:
    """A model at each budget."""
    return Study(base={**BASE, "model": model}, flags=FLAGS, micro_batches=MICRO_BATCHES,
                 budgets={budget: parse_memory(budget) for budget in budgets})


def dry() -> Study:
    """A tiny one, whose larger micro-batches take more than the smaller budget."""
    tiny = {"model": "gpt2", "model_overrides": {"n_layer": 2, "n_embd": 64, "n_head": 2}, "vocab_size": 512,
            "seq_len": 64, "batch_size": 16, "device": "cpu", "loading": {"workers": 0}}
    flags = {"precision": ("bf16",), "optimizer": ("adamw",), "checkpointing": ("none", "every-block")}
    return Study(base={**BASE, **tiny}, flags=flags, micro_batches=(16, 4, 1),
                 budgets={"8MiB": 8 * MIB, "1GiB": 1024 * MIB}, cuts=False)


def key_of(rung: Rung, base: Mapping[str, Any], budget: str) -> str:
    """What a plan made before is found by."""
    return json.dumps([rung.name, budget, base])


def plan_ahead(gpu: str, study: Study) -> None:
    """Plan every budget of a study for a card of the catalogue, and keep the plans for a machine that has it."""
    plans = GpuPlans("frontier", find_device(gpu))
    written = Recipe.from_dict({**study.base}).to_dict()
    for budget, rung in product(study.budgets, PLANS):
        chosen = tightfit.plan(study.base["model"], {**study.base, **rung.changes}, gpu=gpu, gpu_memory=budget).chosen
        if chosen is None:
            print(f"{budget}: {rung.name}: nothing fits", flush=True)
            continue
        changes = {field: value for field, value in chosen.recipe.to_dict().items() if value != written[field]}
        plans.add(key_of(rung, study.base, budget), changes)
        print(f"{budget}: {rung.name}: {json.dumps(changes)}", flush=True)


def combinations(flags: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every combination of flags, with a name."""
    for values in product(*flags.values()):
        changes = dict(zip(flags, values, strict=True))
        words = [value["name"] if isinstance(value, dict) else value for value in values]
        yield ", ".join(words), changes


def catalogued() -> Device | None:
    """The card at hand, where the catalogue has it."""
    return listed_device(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def held(row: Measured, budget: int) -> bool:
    """Whether a row is of a budget: it was cut down to that or, where nothing was cut down, took no more."""
    return row.memory == budget or (row.memory is None and row.driver_bytes <= budget)


def explored(study: Study, budget: str, peers: list[str], folder: Path) -> None:
    """Run what has no row yet at a budget."""
    memory = study.budgets[budget]
    model = study.base["model"]
    machine: Machine | None = None

    def run(rungs: list[Rung], runner: str) -> list[Measured | None]:
        nonlocal machine
        ladder = Ladder(name=f"frontier-{model}", title=model, base=study.base, rungs=tuple(rungs))
        machine = machine or this_machine(ladder.recipe(rungs[0]))
        made = LadderRun(ladder=ladder, scale="full", folder=folder, machine=machine, runners=(runner,), warm_up=2,
                         log=lambda text: print(f"{budget}: {text}", flush=True), steps=5, limit=240.0,
                         memory=memory if study.cuts else None, predicts=False)
        run_rungs(made)
        return [made.measured(rung, runner) for rung in rungs]

    def fits(peer: str, words: str, changes: Mapping[str, Any], micro: int) -> bool:
        rung = Rung(name=f"{words}, micro-batch {micro}", changes={**changes, "micro_batch_size": micro})
        (row,) = run([rung], peer)
        return row is None or (row.status != "out-of-memory" and held(row, memory))

    ready = GpuPlans("frontier", device).newest if (device := catalogued()) else {}
    run([replace(rung, changes=ready.get(key_of(rung, study.base, budget), rung.changes)) for rung in PLANS], OURS)
    sizes, place = study.micro_batches, 0
    for peer, (words, changes) in product(peers, combinations(study.flags)):
        if fits(peer, words, changes, sizes[place]):
            while place > 0 and fits(peer, words, changes, sizes[place - 1]):
                place -= 1
        else:
            while place < len(sizes) - 1:
                place += 1
                if fits(peer, words, changes, sizes[place]):
                    break


def summary(folder: Path, budgets: Iterable[int] = ()) -> list[dict[str, Any]]:
    """The fastest row of each budget and runner. budgets: those that rows do not name, since nothing was cut down."""
    best: dict[tuple[int, str], Measured] = {}
    rows = [row for row in read(folder / RESULTS).measured if row.status == "done"]
    for row, budget in product(rows, {*budgets, *(row.memory for row in rows if row.memory is not None)}):
        place = (budget, row.rung if row.runner == OURS else row.runner)
        if held(row, budget) and (place not in best or row.samples_per_second > best[place].samples_per_second):
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


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0; 1 where nothing was measured; 2 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", action="append", choices=BUDGETS)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--model", default="gpt2-medium")
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--plan", metavar="GPU", help="plan for a card that another machine has; needs no GPU")
    parser.add_argument("--dry", type=Path, metavar="FOLDER", help="try it out on the processor, and write here")
    asked = parser.parse_args(arguments)
    if asked.plan:
        plan_ahead(asked.plan, on_gpu(asked.model, asked.budget or list(BUDGETS)))
        return 0
    if asked.dry is None and not torch.cuda.is_available():
        print("frontier: a budget cuts a GPU down, and torch sees no CUDA device here; write --dry FOLDER to try it "
              "out", file=sys.stderr)
        return 2
    study = on_gpu(asked.model, asked.budget or list(BUDGETS)) if asked.dry is None else dry()
    base = study.base
    name, results = f"frontier-{base['model']}-{record.device_slug()}", asked.dry or record.RESULTS
    folder, kept = (asked.dry or record.RESULTS.parent / "ladders") / name, results / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if kept.exists():
        shutil.copy(kept, folder / RESULTS)
    try:
        with minutes(asked.minutes):
            for budget in study.budgets:
                explored(study, budget, asked.peer or ["hf-trainer"], folder)
    finally:
        if (folder / RESULTS).exists():
            shutil.copy(folder / RESULTS, kept)
    points = summary(folder, () if study.cuts else study.budgets.values())
    about = {"model": base["model"], "seq_len": base["seq_len"], "batch_size": base["batch_size"]}
    print(record.write(name, {**about, "points": points}, results))
    if not points:
        return 1
    title = f"{base['model']}, {base['seq_len']} tokens, global batch {base['batch_size']}"
    draw(points, results / f"{name}.png", title)
    return 0


if __name__ == "__main__":
    sys.exit(main())

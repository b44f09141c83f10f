"""No choice of a plan is worse than one of its own pinnings: each field of each choice is pinned in turn, and the plan
of the pinned recipe is neither faster by more than the clock's error nor milder in numerics at the same speed.

What a choice is held to is the fastest of its plan's table that changes results no more: of what is as fast within the
clock's error the plainest is chosen, and the table shows both.

A pinned recipe's space is a part of the whole one, so what is found there could have been found before, and what was
evaluated is not evaluated again. Cases are recorded one by one; those that are on record are skipped, so that a run
goes on where the last one ended.
Run: python benchmarks/pinnings.py [MODEL ...] [--gpu NAME ...] [--again]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import record
from tightfit.backends import load_backend
from tightfit.devices import find_device
from tightfit.planning.plan import Plan
from tightfit.planning.search.evaluate import InProcess, Job, Outcome
from tightfit.planning.search.exploration import CLOCK_ERROR
from tightfit.planning.search.search import search
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe import Recipe
from tightfit.recipe.lookup import load_recipe
from tightfit.techniques import SLOTS

MODELS = ("gpt2", "gpt2-large", "gpt2-xl", "bert-large", "t5-base", "vit-base", "llama-3.2-1b", "llama-3.1-8b",
          "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "gemma-2b")
GPUS = ("t4", "l4", "rtx-4090", "a100-40gb-sxm", "a100-80gb-sxm", "h100-sxm")
RECORD = record.RESULTS / "pinnings.json"


class Remembered(InProcess):
    """An evaluator that evaluates no recipe twice."""

    side_by_side = 2  # as the command's on two cores

    def __init__(self) -> None:
        backend = load_backend("pytorch")
        super().__init__(standard_tools(backend))
        self.outcomes: dict[str, Outcome] = {}

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome]:
        for recipe, device in jobs:
            key = f"{device.name} {recipe.model_dump_json()}"
            if key not in self.outcomes:
                self.outcomes[key] = self.one(recipe, device)
        return [self.outcomes[f"{device.name} {recipe.model_dump_json()}"] for recipe, device in jobs]


def numerics_change(plan: Plan, slots: Sequence[str]) -> tuple[int, int]:
    """How far the choice changes results: its harshest technique in these slots, then the sum of all."""
    picked = [getattr(plan.recipe, slot).numerics_change for slot in slots]
    return max(picked, default=0), sum(picked)


def row(plan: Plan, slots: Sequence[str]) -> dict[str, Any]:
    """What is recorded of a plan."""
    if plan.chosen is None:
        return {"fits": False, "traces": plan.predictions}
    as_mild = [c.estimate.time.throughput for c in plan.candidates
               if c.estimate.fit_rank.is_safe and not set(c.changes_numerics) - set(plan.chosen.changes_numerics)]
    chosen = plan.chosen.estimate.time.throughput
    return {"fits": True, "throughput": chosen, "fastest": max([chosen, *as_mild]),
            "harshness": numerics_change(plan, slots),
            "safe": plan.chosen.estimate.fit_rank.is_safe, "traces": plan.predictions, "choice": plan.chosen.choices()}


def worse(free: dict[str, Any], pinned: dict[str, Any]) -> str:
    """In what the whole plan is worse than the pinned one; empty where it is not."""
    if not pinned["fits"] or (free["fits"] and free["safe"] and not pinned["safe"]):
        return ""
    if not free["fits"]:
        return "nothing fits, and with the pin something does"
    share = pinned["throughput"] / free.get("fastest", free["throughput"]) - 1
    mild = tuple(pinned["harshness"]) <= tuple(free["harshness"])
    if mild and share > CLOCK_ERROR:
        return f"{share:.1%} slower"
    milder = tuple(pinned["harshness"]) < tuple(free["harshness"])
    return "harsher, and no faster" if milder and pinned["throughput"] >= free["throughput"] else ""


def case(model: str, gpu: str) -> dict[str, Any]:
    """One model on one GPU: its plan, and that of each field of the choice pinned."""
    began = time.process_time()
    recipe, device, evaluator = load_recipe(model, (), cuda=True), find_device(gpu), Remembered()

    def plan(asked: Recipe) -> Plan:
        return search(asked, device, evaluator.tools, evaluator=evaluator)

    free, opened = plan(recipe), [slot for slot in SLOTS if getattr(recipe, slot) == "auto"]
    found: dict[str, Any] = {"free": row(free, opened), "pinned": {}, "worse": {}}
    if free.chosen is not None:
        values = free.recipe.to_dict()
        for field in ["micro_batch_size", *opened]:
            pinned = recipe.override(**{field: values[field]})
            try:
                found["pinned"][field] = row(plan(pinned), opened)
            except Exception as error:  # a case's failure is its result
                found["worse"][field] = f"failed: {error}"
                continue
            if difference := worse(found["free"], found["pinned"][field]):
                found["worse"][field] = difference
    return {**found, "processor_seconds": time.process_time() - began}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--gpu", nargs="*", default=GPUS)
    parser.add_argument("--again", action="store_true", help="measure anew what is on record")
    asked = parser.parse_args()
    cases: dict[str, Any] = json.loads(RECORD.read_text())["cases"] if RECORD.exists() else {}
    gpus = asked.gpu
    pairs = [(model, gpus[(at + shift) % len(gpus)]) for shift in range(len(gpus)) for at, model in
             enumerate(asked.models)]  # a run that is cut short has seen every model
    for model, gpu in pairs:
        name = f"{model} {gpu}"
        if name in cases and not asked.again:
            continue
        cases[name] = case(model, gpu)
        bad = cases[name]["worse"]
        print(f"{name:32} {len(cases[name]['pinned'])} pinned, {bad or 'none better'}, "
              f"{cases[name]['processor_seconds']:.0f} s", flush=True)
        record.write("pinnings", {"clock_error": CLOCK_ERROR, "met": not any(c["worse"] for c in cases.values()),
                                  "cases": cases})
    return 1 if any(each["worse"] for each in cases.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

"""How long planning takes: a prediction, a search, and the plan of a recipe that pins every field, eager and compiled.

Each case has a process of its own, which does it twice: the first time is what a command-line user waits for, besides
starting Python and importing PyTorch and transformers, which is timed apart. Searches ask for the smallest GPU too, as
`tightfit plan` does. Cases that are named are measured anew, and the others kept as recorded.
Run: python benchmarks/plan_latency.py [CASE ...]
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

GOALS = {"prediction": 5.0, "search": 60.0, "eager": 10.0, "compiled": 25.0}
"""Seconds at most: of the prediction of PREDICTED, of every search, and of recipes with all fields pinned."""
PREDICTED = "llama-3.1-8b"
PINNED = ("precision=bf16", "loss=chunked", "checkpointing=none", "optimizer=adamw", "attention=sdpa", "offload=none",
          "accumulation=loop", "update=after-backward", "micro_batch_size=64", "batch_size=64")
SECONDS = 900
"""A process that takes longer is given up."""


@dataclass(frozen=True)
class Case:
    """What is planned. changes: recipe fields, as `key=value`."""

    kind: Literal["prediction", "search", "eager", "compiled"]
    model: str
    gpu: str
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        changes = self.changes if self.kind in ("prediction", "search") else ()
        return " ".join([self.kind, self.model, self.gpu, *changes])


CASES = (
    Case("prediction", "llama-3.1-8b", "h100-sxm", ("seq_len=4096",)),
    Case("prediction", "llama-3.1-8b", "h100-sxm", ("seq_len=4096", "checkpointing=every-block")),
    Case("prediction", "llama-3.1-8b", "h100-sxm", ("seq_len=4096", "optimizer=adamw-8bit")),
    Case("prediction", "llama-3.1-8b", "h100-sxm", ("seq_len=4096", "precision=fp8")),
    Case("prediction", "llama-3.1-8b", "cpu", ("seq_len=512",)),
    Case("prediction", "gpt2", "rtx-4090"),
    Case("prediction", "bert-large", "t4"),
    Case("search", "llama-3.1-8b", "h100-sxm"),
    Case("search", "llama-3.1-8b", "rtx-4070-ti-super",
         ("trainable=lora", "base=nf4", "seq_len=2048", "batch_size=16")),
    Case("search", "llama-3.2-1b", "rtx-4090"),
    Case("search", "gpt2", "rtx-4090"),
    Case("search", "gpt2-xl", "a100-40gb-sxm", ("allow_numerics=true",)),
    Case("search", "bert-large", "t4"),
    Case("search", "t5-base", "v100-16gb-sxm"),
    Case("search", "vit-base", "a10"),
    Case("search", "qwen2.5-7b", "l4"),
    Case("eager", "gpt2", "a100-80gb-sxm", (*PINNED, "compile=off")),
    Case("compiled", "gpt2", "a100-80gb-sxm", (*PINNED, "compile=whole")),
)


def do(case: Case) -> dict[str, Any]:
    """Plan, twice. Seconds, and what came out."""
    began = time.perf_counter()
    import tightfit
    from tightfit.backends.pytorch.backend import PytorchBackend
    from tightfit.devices import find_device
    from tightfit.planner import plan_on
    from tightfit.planning.defaults import resolve
    from tightfit.recipe.lookup import load_recipe

    importing = time.perf_counter() - began
    recipe = load_recipe(case.model, case.changes, cuda=case.gpu != "cpu")
    backend = PytorchBackend()

    def predict() -> dict[str, Any]:
        on_cpu = case.gpu == "cpu"
        device = backend.device(tightfit.Recipe.from_dict({"device": "cpu"})) if on_cpu else find_device(case.gpu)
        trace = backend.predict(resolve(recipe, device), device)
        return {"ops": len(trace.ops), "allocations": len(trace.allocations), "peak_bytes": trace.peak()[1]}

    def search() -> dict[str, Any]:
        found = plan_on(lambda cuda: recipe, case.gpu)
        chosen = None if found.chosen is None else found.chosen.choices()
        return {"combinations": found.tried, "predictions": found.predictions, "chosen": chosen}

    work = predict if case.kind == "prediction" else search
    seconds, computing = [], []
    for _ in range(2):
        began, before = time.perf_counter(), time.process_time()
        outcome = work()
        seconds.append(time.perf_counter() - began)
        computing.append(time.process_time() - before)  # what other processes take of the machine left out
    return {"import_seconds": importing, "cold_seconds": seconds[0], "warm_seconds": seconds[1],
            "cold_processor_seconds": computing[0], "warm_processor_seconds": computing[1], **outcome}


def apart(case: Case) -> dict[str, Any]:
    """The same in a new process; `failure` tells what went wrong."""
    import record

    began = time.perf_counter()
    printed, failure = record.apart(__file__, "--do", str(CASES.index(case)), seconds=SECONDS)
    seconds = time.perf_counter() - began
    return {"failure": failure} if failure else {**json.loads(printed.splitlines()[-1]), "process_seconds": seconds}


def judge(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each goal with the slowest case that it is about, by name, as a fresh process has it."""
    goals = []
    for kind, at_most in GOALS.items():
        whose = f"{kind} {PREDICTED} " if kind == "prediction" else f"{kind} "
        about = {name: row["cold_seconds"] for name, row in found.items()
                 if "cold_seconds" in row and name.startswith(whose)}
        slowest = max(about, key=lambda name: about[name], default=None)
        seconds = None if slowest is None else about[slowest]
        goals.append({"goal": f"{kind}, imports apart", "at_most": at_most, "slowest": slowest, "seconds": seconds,
                      "met": None if seconds is None else seconds <= at_most})
    return goals


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1] == "--do":
        print(json.dumps(do(CASES[int(sys.argv[2])])))
        return 0
    import record

    wanted = [case for case in CASES if len(sys.argv) < 2 or any(word in case.name for word in sys.argv[1:])]
    kept = record.RESULTS / "plan_latency.json"
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text())["cases"] if len(sys.argv) > 1 else {}
    for case in wanted:
        row = found[case.name] = apart(case)
        text = row.get("failure") or (
            f"{row['cold_seconds']:6.2f} s cold ({row['cold_processor_seconds']:.2f} of computing), "
            f"{row['warm_seconds']:6.2f} warm, {row['import_seconds']:.1f} of importing")
        print(f"{case.name:60} {text}", flush=True)
    goals = judge(found)
    for goal in goals:
        verdict = {True: "met", False: "MISSED", None: "not measured"}[goal["met"]]
        print(f"{goal['goal']:30} at most {goal['at_most']:.0f} s: {verdict} ({goal['slowest']})")
    failed = any("failure" in row for row in found.values())
    load = os.getloadavg()[0]
    print(record.write("plan_latency", {"cores": os.cpu_count(), "load": load, "goals": goals, "cases": found}))
    return 1 if failed or any(goal["met"] is False for goal in goals) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Is what the planner chooses the fastest? Three small models on this machine's CPU, every setting run for real.

First the machine is calibrated. Then, for each model, every combination of a small grid is planned with them
and run: micro-batch, checkpointing, attention, the optimizer's implementation, and precision, the global batch fixed.
All combinations take turns, one step each a round, and the least of a combination's times counts. The search chooses
for the same recipe with those fields left `auto`; what it chooses takes part in the rounds too. Compiling is left out.

Noise is how far a combination's best time of the odd rounds is from that of the even ones, at the median.
Run: python benchmarks/search_quality.py [--seconds 420] [--only MODEL]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch

import record
from random_global_batches import random_global_batch
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import TensorGlobalBatch
from tightfit.backends.pytorch.measure.calibration.measure import measure
from tightfit.backends.pytorch.step import Step
from tightfit.calibration import Calibration
from tightfit.devices import Device
from tightfit.planning.search.search import search
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.timing.step_time import step_time
from tightfit.recipe import Recipe

WITHIN, CORRELATED = 0.10, 0.80
"""The goals: the chosen recipe's time over the best one's, less noise; Spearman's rank correlation."""
FEWEST_ROUNDS = 4
COMMON: dict[str, Any] = {
    "data": "dummy", "loading": {"workers": 2}, "compile": "off", "pretrained": False, "max_steps": 100,
    "device": "cpu", "batch_size": 8,
}
"""What all have. Data is ready when a step asks for it, as workers would have it."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model": "gpt2", "task": "causal-lm", "vocab_size": 2048, "seq_len": 128,
        "model_overrides": {"n_layer": 4, "n_head": 4, "n_embd": 192, "n_positions": 128},
    },
    "bert": {
        "model": "bert-base", "task": "masked-lm", "vocab_size": 1024, "seq_len": 192,
        "model_overrides": {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 160,
                            "intermediate_size": 640, "max_position_embeddings": 192},
    },
    "llama": {
        "model": "llama-3.2-1b", "task": "causal-lm", "vocab_size": 1024, "seq_len": 256,
        "model_overrides": {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                            "hidden_size": 128, "head_dim": 32, "intermediate_size": 384},
    },
}
GRID: dict[str, tuple[Any, ...]] = {
    "micro_batch_size": (1, 2, 8),
    "checkpointing": ("none", "every-block"),
    "attention": ("sdpa", "eager"),
    "optimizer": ({"name": "adamw", "implementation": "fused"}, {"name": "adamw", "implementation": "loop"}),
    "precision": ("fp32", "bf16"),
}


@dataclass
class Entry:
    """A combination: its recipe, predicted seconds of a step, and measured ones, one a round."""

    recipe: Recipe
    predicted: float
    measured: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.measured)

    def to_dict(self) -> dict[str, Any]:
        values = self.recipe.to_dict()
        return {**{name: values[name] for name in GRID}, "predicted": self.predicted, "measured": self.best,
                "rounds": len(self.measured)}


def grid(values: Mapping[str, Any]) -> list[Recipe]:
    """Every combination, as a recipe."""
    return [Recipe.from_dict({**COMMON, **values, **dict(zip(GRID, chosen, strict=True))})
            for chosen in product(*GRID.values())]


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 1, float64 (N,); equal values share the mean of theirs."""
    array = np.asarray(values, dtype=np.float64)
    _, group, counts = np.unique(array, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean: np.ndarray = (ends - (counts - 1) / 2)[group]
    return mean


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, of at least two different values each."""
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def noise(measured: Iterable[Sequence[float]]) -> float:
    """How far the best of odd rounds is from the best of even ones, relative, at the median."""
    gaps = [abs(min(times[0::2]) / min(times[1::2]) - 1) for times in measured if len(times) > 1]
    return float(np.median(gaps)) if gaps else 0.0


def judge(entries: Sequence[Entry], chosen: Entry) -> dict[str, Any]:
    """What the measurements say of the choice and of the predictions."""
    best, floor = min(entries, key=lambda e: e.best), noise(e.measured for e in entries)
    likeliest = min(entries, key=lambda e: e.predicted)
    behind = chosen.best / best.best - 1
    correlation = spearman([e.predicted for e in entries], [e.best for e in entries])
    errors = [abs(e.predicted / e.best - 1) for e in entries]
    return {
        "combinations": len(entries), "rounds": min(len(e.measured) for e in entries), "noise": floor,
        "chosen_behind_best": behind, "fastest_predicted_behind_best": likeliest.best / best.best - 1,
        "rank_correlation": correlation, "step_time_error": record.quantiles(errors),
        "met": {"chosen": behind <= WITHIN + floor, "correlation": correlation >= CORRELATED},
        "chosen": chosen.to_dict(), "best": best.to_dict(),
        "all": [e.to_dict() for e in sorted(entries, key=lambda e: e.best)],
    }


def plan(values: Mapping[str, Any], device: Device, calibration: Calibration) -> tuple[list[Entry], Entry]:
    """The grid's combinations with their predictions, and the search's choice, which is one of them or one more."""
    backend = PytorchBackend()

    def entry(recipe: Recipe) -> Entry:
        return Entry(recipe, step_time(backend.predict(recipe, device), recipe, device, calibration).seconds)

    entries = [entry(recipe) for recipe in grid(values)]
    tools = standard_tools(backend, calibration)
    found = search(Recipe.from_dict({**COMMON, **values}), device, tools)
    same = [e for e in entries if _settings(e.recipe) == _settings(found.recipe)]
    chosen = same[0] if same else entry(found.recipe)
    return (entries if same else [*entries, chosen]), chosen


def _settings(recipe: Recipe) -> tuple[Any, ...]:
    """What tells combinations apart; `auto` is AdamW's fused implementation."""
    values = {name: recipe.to_dict()[name] for name in GRID}
    optimizer = values["optimizer"]
    if isinstance(optimizer, Mapping) and optimizer.get("implementation") == "fused":
        rest = {knob: value for knob, value in optimizer.items() if knob != "implementation"}
        values["optimizer"] = rest if len(rest) > 1 else rest["name"]
    return tuple(repr(value) for value in values.values())


def run(entries: Sequence[Entry], device: Device, until: float) -> None:
    """Rounds of one step of each, until that time of `time.monotonic`, and at least FEWEST_ROUNDS."""
    backend, steps = PytorchBackend(), list[tuple[Step, TensorGlobalBatch]]()
    for entry in entries:
        build = backend.build(entry.recipe, device)
        steps.append((Step(build, inspect=False), random_global_batch(entry.recipe, build.task, build.facts, 0)))
    gc.collect()
    gc.disable()
    try:
        for number in range(10_000):
            for entry, (step, global_batch) in zip(entries, steps, strict=True):
                with ExitStack() as stack:
                    stack.enter_context(step.build.process_settings())
                    began = time.perf_counter()
                    step(global_batch, entry.recipe.learning_rate).read()
                    seconds = time.perf_counter() - began
                if number:  # the first step makes the states
                    entry.measured.append(seconds)
            if number >= FEWEST_ROUNDS and time.monotonic() > until:
                return
    finally:
        gc.enable()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=420.0, help="for everything; some rounds are always run")
    parser.add_argument("--only", choices=MODELS, help="one model, and nothing recorded")
    asked = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    calibration = measure(torch.device("cpu"))
    device = PytorchBackend().device(Recipe.from_dict({"device": "cpu"}))
    if calibration.disturbed:
        sys.exit(calibration.disturbed)
    calibrating = time.monotonic() - began
    print(f"calibrated in {calibrating:.0f} s", flush=True)
    names = [asked.only] if asked.only else list(MODELS)
    found: dict[str, Any] = {}
    for number, name in enumerate(names):
        start = time.monotonic()
        until = start + (asked.seconds - (start - began)) / (len(names) - number)
        entries, chosen = plan(MODELS[name], device, calibration)
        planned = time.monotonic() - start
        run(entries, device, until)
        row = found[name] = {**judge(entries, chosen), "planning_seconds": planned}
        print(f"{name:8} chosen {row['chosen_behind_best']:+.1%} behind the best (at most {WITHIN:.0%} beyond noise of "
              f"{row['noise']:.1%}); rank correlation {row['rank_correlation']:.3f} (at least {CORRELATED}); "
              f"{row['combinations']} combinations, {row['rounds']} rounds, planned in {planned:.0f} s", flush=True)
    met = all(all(row["met"].values()) for row in found.values())
    print("goals met" if met else "goals MISSED")
    if not asked.only:
        print(record.write("search_quality", {
            "goals": {"chosen_behind_best": WITHIN, "rank_correlation": CORRELATED}, "met": met,
            "seconds": time.monotonic() - began, "calibrating_seconds": calibrating, "models": found,
        }))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

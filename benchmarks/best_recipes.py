"""The fastest recipe of each bundled model that fits a card of 8, 12, 16, 24, 40 or 80 GB, as `tightfit plan` finds it.

Each model is planned as `tightfit plan MODEL --gpu-memory SIZE` plans it, once per size, with the traces shared among
the sizes. What is chosen becomes the bundled recipe MODEL-SIZE, which carries its figures; results/best_recipes.json
has them all, and what nothing fits. A call goes on where the last one stopped; a model that is named is planned anew.
Run: python benchmarks/best_recipes.py [MODEL ...]
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import record
from tightfit.bundled import BUNDLED
from tightfit.devices import Device, device_of_memory, parse_memory
from tightfit.planner import compare
from tightfit.planning.search.every_gpu import Compared
from tightfit.planning.wording import size
from tightfit.recipe import CHOICES, Recipe
from tightfit.recipe_files import load_recipe, recipe_values
from tightfit.recipe_text import to_yaml

BUDGETS = ("8GB", "12GB", "16GB", "24GB", "40GB", "80GB")
KEPT = record.RESULTS / "best_recipes.json"
RECIPES = record.RESULTS.parent / "recipes"


def recipe_name(model: str, budget: str) -> str:
    """`gpt2-24gb`."""
    return f"{model}-{budget.lower()}"


def figures(row: Compared, asked: Recipe) -> dict[str, Any]:
    """What a budget's row in the record says: the choice with its cost, or by how much the nearest misses."""
    found: dict[str, Any] = {"device": row.device.name, "memory_bytes": row.device.memory_bytes}
    if row.chosen is None:
        nearest = row.plan.candidates[0] if row.plan is not None and row.plan.candidates else None
        missing = None if nearest is None else nearest.estimate.missing
        return {**found, "recipe": None, "refused": row.refused or None, "missing_bytes": missing}
    memory, when = row.chosen.estimate.memory, row.chosen.estimate.time
    values = row.chosen.recipe.to_dict()
    written = {**recipe_values(asked.model), "seq_len": asked.seq_len, "batch_size": asked.batch_size}
    return {
        **found,
        "recipe": {**written, **{field: values[field] for field in CHOICES}},
        "changes_numerics": list(row.chosen.changes_numerics),
        "fits": row.chosen.estimate.fits,
        "used_bytes": memory.used,
        "step_seconds": when.step_seconds,
        "samples_per_second": when.samples_per_second,
        "tokens_per_second": when.tokens_per_second,
        "mfu": when.mfu,
    }


def write_recipe(model: str, budget: str, found: dict[str, Any]) -> None:
    """The bundled recipe of a budget, or none where nothing fits."""
    path = RECIPES / f"{recipe_name(model, budget)}.yaml"
    if found["recipe"] is None:
        path.unlink(missing_ok=True)
        return
    tokens = found["tokens_per_second"]
    speed = f"{tokens:,.0f} tokens/s" if tokens else f"{found['samples_per_second']:,.0f} samples/s"
    changed = found["changes_numerics"]
    loses = f"\n# Nothing fits without changing numerics: {', '.join(changed)}." if changed else ""
    path.write_text(
        f"# The fastest way to train {model} found for a card of {budget}: on a {found['device']}\n"
        f"# {speed} at {size(found['used_bytes'])} are predicted, and not yet measured.{loses}\n"
        f"# results/best_recipes.json; again: tightfit plan {model} --gpu-memory {budget}\n"
        + to_yaml(found["recipe"]), encoding="utf-8")  # fmt: skip


def planned(model: str, devices: dict[str, Device]) -> dict[str, Any]:
    """The rows of a model, by budget."""
    asked = load_recipe(model, cuda=True)
    rows = {row.device.name: row for row in compare(lambda cuda: asked, devices=devices.values()).rows}
    return {budget: figures(rows[device.name], asked) for budget, device in devices.items()}


def main() -> None:
    devices = {budget: device_of_memory(parse_memory(budget)) for budget in BUDGETS}
    named = sys.argv[1:]
    if unknown := set(named) - set(BUNDLED):
        sys.exit(f"no such bundled model: {', '.join(sorted(unknown))}; there are {', '.join(BUNDLED)}")
    models: dict[str, Any] = json.loads(KEPT.read_text())["models"] if KEPT.exists() else {}
    for model in named or [model for model in BUNDLED if model not in models]:
        began = time.process_time()
        models[model] = planned(model, devices)
        record.write("best_recipes", {"models": {name: models[name] for name in BUNDLED if name in models}})
        fitting = [budget for budget, found in models[model].items() if found["recipe"] is not None]
        print(f"{model:20} {time.process_time() - began:5.0f} s; {' '.join(fitting) or 'fits none'}", flush=True)
    for model, rows in models.items():
        for budget, found in rows.items():
            write_recipe(model, budget, found)


if __name__ == "__main__":
    main()

"""Plans of an 8B model with adapters beside weights of 4 bits (QLoRA) on a card with 24 GB: what a search chooses, and
the least memory.

Run: python benchmarks/adapter_plans.py     writes results/adapter_plans.json; no GPU is needed
"""

from __future__ import annotations

import json
from typing import Any

import record
import tightfit
from tightfit.devices import GIB

MODEL, GPU = "llama-3.1-8b", "rtx-4090"
ADAPTERS = {"trainable": "lora", "base": "nf4"}
ASKED: dict[str, dict[str, Any]] = {
    "fastest": {},
    "every block recomputed, nothing compiled": {"checkpointing": "every-block", "compile": "off"},
}


def row(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The choice of a plan that pins those fields, and its cost."""
    plan = tightfit.plan(MODEL, {**ADAPTERS, **fields}, gpu=GPU)
    assert plan.chosen is not None
    recipe, cost = plan.chosen.recipe, plan.chosen.estimate
    return {
        "asked": name, "micro_batch_size": recipe.micro_batch_size, "seq_len": recipe.seq_len,
        "used_gib": round(cost.memory.used / GIB, 2), "tokens_per_second": round(cost.time.tokens_per_second),
        "error": cost.time.error, "recipe": recipe.to_dict(),
    }  # fmt: skip


def main() -> None:
    rows = []
    for name, fields in ASKED.items():
        rows.append(row(name, fields))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "recipe"}), flush=True)
    print(record.write("adapter_plans", {"model": MODEL, "gpu": GPU, "rows": rows}))


if __name__ == "__main__":
    main()

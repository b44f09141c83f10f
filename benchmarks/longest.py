"""The longest sequences of an 8B model that fit a card, planned: with each block recomputed as a whole, and with its
feed-forward part and norms in tiles.

Run: python benchmarks/longest.py     writes results/longest.json; no GPU is needed; some ten minutes on one core
"""

from __future__ import annotations

import json
import time
from typing import Any

import record
from tightfit.backends import load_backend
from tightfit.devices import GIB, find_device
from tightfit.planning.search.evaluate import Evaluated, InProcess
from tightfit.planning.search.extremes import candidates, find_largest
from tightfit.planning.search.space import Space
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe import Recipe

MODEL = "llama-3.1-8b"
QLORA: dict[str, Any] = {"trainable": "lora", "base": "nf4"}
ASKED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("rtx-4090", "adapters beside 4 bits", QLORA),
    ("rtx-4060-ti-16gb", "adapters beside 4 bits", QLORA),
    ("rtx-4090", "all weights", {}),
)
"""Card, and what is trained."""
WAYS = ("every-block", "tiled-mlp")


def row(gpu: str, trained: str, fields: dict[str, Any], checkpointing: str) -> dict[str, Any]:
    """The longest sequence that fits so, and its cost."""
    begun = time.perf_counter()
    device, backend = find_device(gpu), load_backend("pytorch")
    recipe = Recipe.from_dict({"model": MODEL, "batch_size": 1, "data": {"source": "dummy", "eval_fraction": 0},
                               "checkpointing": checkpointing, **fields})
    evaluator = InProcess(standard_tools(backend))
    found, most = find_largest("seq_len", candidates(recipe, "seq_len", backend.model_size), device, evaluator)
    (best,) = evaluator([(Space(found, device).least_memory_recipe(), device)])
    assert isinstance(best, Evaluated), best
    memory = best.estimate.memory
    return {
        "gpu": device.name, "memory_gib": round(device.memory_bytes / GIB, 1), "trained": trained,
        "checkpointing": checkpointing, "seq_len": most.value, "fits": memory.verdict,
        "allocated_gib": round(memory.peak_allocated / GIB, 2), "used_gib": round(memory.used / GIB, 2),
        "host_gib": round(sum(memory.host_by_category.values()) / GIB, 1),
        "tokens_per_second": round(best.estimate.time.tokens_per_second), "recipe": best.recipe.to_dict(),
        "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip


def main() -> None:
    rows: list[dict[str, Any]] = []
    for gpu, trained, fields in ASKED:
        for checkpointing in WAYS:
            rows.append(row(gpu, trained, fields, checkpointing))
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "recipe"}), flush=True)
            written = record.write("longest", {"model": MODEL, "rows": rows})
    print(written)


if __name__ == "__main__":
    main()

"""What measuring costs: a step with every op followed under the profiler, over the same step as it is.

Five small models on this machine's device; the plain step is the one of median length among several. What an op took
is measured inside its mark; the overhead lies between.
Run: python benchmarks/profile_overhead.py [--steps 9]
"""

from __future__ import annotations

import argparse
from itertools import count
from typing import Any

import torch

import record
from random_global_batches import random_global_batch
from tightfit.backends.measuring import measure
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe

COMMON: dict[str, Any] = {"data": "dummy", "batch_size": 8, "micro_batch_size": 4, "pretrained": False}
_BERT = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 1024}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"model": "gpt2", "seq_len": 256, "vocab_size": 2048,
             "model_overrides": {"n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 256}},
    "gpt2 recomputed": {"model": "gpt2", "seq_len": 256, "vocab_size": 2048, "checkpointing": "every-block",
                        "model_overrides": {"n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 256}},
    "gpt2 compiled": {"model": "gpt2", "seq_len": 256, "vocab_size": 2048, "compile": "per-block",
                      "model_overrides": {"n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 256}},
    "bert": {"model": "bert-base", "task": "masked-lm", "seq_len": 256, "vocab_size": 2048, "model_overrides": _BERT},
    "llama bf16": {"model": "llama-3.2-1b", "seq_len": 256, "vocab_size": 2048, "precision": "bf16",
                   "model_overrides": {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                                       "hidden_size": 256, "head_dim": 64, "intermediate_size": 768}},
}


def measured(fields: dict[str, Any], steps: int) -> dict[str, Any]:
    """One case: seconds of a plain step, and the measured one's over it."""
    backend = PytorchBackend()
    recipe = Recipe.from_dict({**COMMON, **fields})
    device = backend.device(recipe)
    build = backend.build(resolve(recipe, device), device)
    global_batches = (random_global_batch(build.recipe, build.task, build.facts, seed) for seed in count())
    found = measure(backend, backend.step(build), global_batches, steps)
    seconds = sum(op.seconds or 0.0 for op in found.trace.ops)
    return {"step_seconds": found.step_seconds, "overhead": found.overhead, "ops": len(found.trace.ops),
            "ops_seconds": seconds, "ops_share": seconds / found.step_seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9, help="plain steps that are timed")
    asked = parser.parse_args()
    torch.manual_seed(0)
    found = {}
    for name, fields in CASES.items():
        row = found[name] = measured(fields, asked.steps)
        print(f"{name:16} {1e3 * row['step_seconds']:8.1f} ms a step, {row['overhead']:.2f} times that when measured; "
              f"{row['ops']} ops take {row['ops_share']:.0%} of the plain step", flush=True)
    print(record.write("profile_overhead", {"cases": found}))


if __name__ == "__main__":
    main()

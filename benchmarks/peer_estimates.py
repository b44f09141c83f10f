"""Memory estimates of other tools beside tightfit's, on the same models, against what a real step allocates.

    python benchmarks/peer_estimates.py     about a minute on two cores, no GPU

- Measured: torch.profiler's own allocation events over two real steps on the CPU (`cpu_truth`).
- `accelerate estimate-memory`: its own functions, called on the model on torch's meta device, for it would ask the hub
  for a configuration. It states a figure for training with Adam at batch size 1, by the weights' bytes alone.
- DeepSpeed's estimators: DeepSpeed is not installed here, and its published formulas were computed, not run
  (`estimate_zero2_model_states_mem_needs` in deepspeed/runtime/zero/stage_1_and_2.py and
  `estimate_zero3_model_states_mem_needs` in stage3.py), for one GPU and no offloading. They say "model states" and
  leave activations to the user.

Written to results/peer_estimates.json, from which docs/peer_estimates.md is made.
"""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.commands.estimate import calculate_maximum_sizes, estimate_training_usage
from torch import nn

from cpu_truth import measured_peaks
from random_global_batches import random_global_batch
from record import write
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import TensorGlobalBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.models import build_model
from tightfit.devices import Device
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.tasks import get_task

CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 40)
TOOLS = ("tightfit", "accelerate", "deepspeed_zero2", "deepspeed_zero3")

GPT2 = {"model": "gpt2", "model_overrides": {
    "n_layer": 4, "n_embd": 384, "n_head": 6, "n_positions": 512, "vocab_size": 8192,
}}  # fmt: skip
LLAMA = {"model": "mistral-7b", "model_overrides": {
    "num_hidden_layers": 4, "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 512,
}}  # fmt: skip
BERT = {"model": "bert-base", "task": "sequence-classification", "model_overrides": {
    "num_hidden_layers": 4, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "vocab_size": 8192,
}}  # fmt: skip
T5 = {"model": "t5-small", "task": "seq2seq", "model_overrides": {
    "num_layers": 3, "num_decoder_layers": 3, "d_model": 384, "d_ff": 1024, "num_heads": 6, "vocab_size": 8192,
}}  # fmt: skip
PLAIN = {"precision": "fp32", "optimizer": "adamw", "checkpointing": "none"}


@dataclass(frozen=True)
class Case:
    """A model, the batch (sequences x tokens) of one forward pass, and the techniques."""

    what: str
    model: dict[str, Any]
    rows: int
    tokens: int
    techniques: dict[str, Any] = field(default_factory=dict)

    def recipe(self) -> Recipe:
        return resolve(Recipe.from_dict({
            **self.model, **PLAIN, **self.techniques, "batch_size": self.rows, "micro_batch_size": self.rows,
            "seq_len": self.tokens, "data": "dummy", "device": "cpu",
        }), CPU)  # fmt: skip


CASES = (
    Case("GPT-2", GPT2, 1, 64),
    Case("GPT-2", GPT2, 8, 256),
    Case("GPT-2, mixed bf16", GPT2, 8, 256, {"precision": "bf16"}),
    Case("GPT-2, checkpointing", GPT2, 8, 256, {"checkpointing": "every-block"}),
    Case("GPT-2, Adafactor", GPT2, 1, 64, {"optimizer": "adafactor"}),
    Case("Llama", LLAMA, 1, 64),
    Case("Llama", LLAMA, 4, 512),
    Case("Llama, pure bf16", LLAMA, 4, 512, {"precision": {"name": "bf16-pure", "rounding": "nearest"}}),
    Case("BERT, classification", BERT, 16, 128),
    Case("T5", T5, 8, 128),
)


def measured(recipe: Recipe) -> int:
    """The most that two real steps hold at once."""

    def global_batches(build: Build) -> list[TensorGlobalBatch]:
        return [random_global_batch(build.recipe, build.task, build.facts, seed) for seed in range(2)]

    return max(measured_peaks(recipe, CPU, global_batches).values())


def predicted(recipe: Recipe) -> int:
    """The same of tightfit's trace."""
    trace = PytorchBackend().predict(recipe, CPU)
    return trace.peak(0, trace.span("step 2").stop)[1]


def peers(recipe: Recipe) -> dict[str, int]:
    """What the other tools say, in bytes."""
    assert recipe.precision != "auto"
    model = build_model(recipe, get_task(recipe.task), "meta").model
    dtype = "float32" if recipe.precision.name == "fp32" else "bfloat16"
    usage = estimate_training_usage(calculate_maximum_sizes(model)[0], dtype)
    count = sum(parameter.numel() for parameter in model.parameters())
    return {
        "accelerate": max(usage.values()),
        "deepspeed_zero2": 2 * count + 18 * count,  # half weights; half and fp32 gradients, fp32 weights, two states
        "deepspeed_zero3": 4 * largest_module(model) + 18 * count,
    }


def largest_module(model: nn.Module) -> int:
    """Parameters that one module holds itself: what ZeRO-3's formula calls a layer."""
    return max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())


def compare(case: Case) -> dict[str, Any]:
    """One row: bytes of every tool, and its error against the measured ones."""
    recipe = case.recipe()
    truth = measured(recipe)
    said = {"tightfit": predicted(recipe), **peers(recipe)}
    return {
        "what": case.what, "batch": f"{case.rows} x {case.tokens}", "recipe": recipe.to_dict(), "measured": truth,
        "said": said, "error": {tool: said[tool] / truth - 1 for tool in TOOLS},
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    began = time.perf_counter()
    rows = []
    for case in CASES:
        row = compare(case)
        rows.append(row)
        errors = "  ".join(f"{tool} {row['error'][tool]:+.2%}" for tool in TOOLS)
        print(f"{case.what:<24} {row['batch']:>8} {row['measured'] / 2**20:8.1f} MiB  {errors}", flush=True)
    spread = {tool: sorted(abs(row["error"][tool]) for row in rows) for tool in TOOLS}
    summary = {tool: {"median": statistics.median(e), "worst": e[-1]} for tool, e in spread.items()}
    path = write("peer_estimates", {"seconds": round(time.perf_counter() - began, 1), "summary": summary, "rows": rows})
    print(f"wrote {path}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

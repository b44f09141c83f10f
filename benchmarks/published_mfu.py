"""Predicted MFU beside the highest that was published for the card: a prediction above it is wrong.

MFU counts 6 FLOPs a token for each weight that it is multiplied by, and 12 for each pair of positions, layer and
feature, masked or not, as PaLM, torchtitan, llm-foundry and nanochat count it; recomputation counts nothing. A causal
kernel skips half of the pairs, so that at long sequences MFU may come near the share that it sustains, or above it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tightfit.backends import load_backend
from tightfit.devices import find_device
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import training_time
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe import Recipe

LLMQ = "IST-DASLab/llmq README, bf16 on one card, cuDNN's attention"
PRODUCTS = "no training run with an MFU was found; what large products sustain"


class Highest(NamedTuple):
    """The highest MFU that was published for a card, and where."""

    mfu: float
    source: str


HIGHEST = {
    "h100-sxm": Highest(0.60, f"{LLMQ}: Qwen2.5-7B"),
    "h200": Highest(0.60, f"{LLMQ}: Qwen2.5-7B on an H100, whose peak is the same"),
    "rtx-4090": Highest(0.80, f"{LLMQ}: Qwen2.5-1.5B"),
    "rtx-3090": Highest(0.95, "modula-systems/modula pull request 1: 0.74 measured, about 0.95 said of a usual "
                        "implementation, compiled, layers of a 7B model"),
    "a100-80gb-sxm": Highest(0.74, "karpathy/nanochat pull request 147, eight cards, PyTorch compiled"),
    "l4": Highest(0.44, PRODUCTS),
    "t4": Highest(0.54, PRODUCTS),
}

CASES: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"model": "qwen2.5-0.5b", "seq_len": 32768, "micro_batch_size": 1, "checkpointing": "every-block"},
     ("h100-sxm", "rtx-4090", "a100-80gb-sxm")),
    ({"model": "llama-3.1-8b", "seq_len": 8192, "micro_batch_size": 1, "precision": "bf16-pure"}, ("h200",)),
    ({"model": "llama-3.2-1b", "seq_len": 2048, "micro_batch_size": 4}, ("rtx-4090", "rtx-3090", "l4")),
    ({"model": "gpt2", "seq_len": 1024, "micro_batch_size": 12}, ("t4", "rtx-4090")),
)
USUAL = {"data": {"source": "dummy"}, "attention": "sdpa", "loss": "chunked", "optimizer": "adamw",
         "checkpointing": "none", "compile": "per-block"}


def utilizations() -> list[dict[str, Any]]:
    """Every case on every card."""
    backend = load_backend("pytorch")
    tools = standard_tools(backend)
    found = []
    for case, cards in CASES:
        for card in cards:
            device = find_device(card)
            half = "bf16" if device.at_least(8) else "fp16"
            fields = {**USUAL, "precision": half, "batch_size": 8 * case["micro_batch_size"], **case}
            recipe = resolve(Recipe.from_dict(fields), device)
            time, _ = training_time(backend.predict(recipe, device), recipe, device, tools)
            found.append({**case, "card": device.name, "predicted": round(time.mfu, 4), **HIGHEST[card]._asdict()})
            print(f"{case['model']} on {device.name}: MFU {time.mfu:.1%}, {HIGHEST[card].mfu:.0%} at most", flush=True)
    return found

"""What techniques declare for the search, `activation_share` and `slowdown`, beside what plans predict.

    python benchmarks/technique_facts.py     a few minutes on two cores; no GPU

Each variant is set in a recipe that is otherwise the usual one with chunked cross-entropy, and compared with its slot's
plainest. The search only begins with these figures: what it traced replaces them. Written to
results/technique_facts.json, with the median over the models whose GPU serves it.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from record import write
from tightfit.backends import load_backend
from tightfit.devices import find_device
from tightfit.planning.defaults import resolve
from tightfit.planning.search.evaluate import Evaluated, InProcess
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe.lookup import load_recipe

CASES = (("gpt2", "rtx-4090"), ("llama-3.2-1b", "a100-80gb-sxm"), ("bert-large", "l4"))
USUAL = ("batch_size=32", "loss=chunked", "checkpointing=none", "compile=off", "optimizer=adamw", "attention=sdpa")
VARIANTS = {  # by the slot, its plainest variant first
    "checkpointing": ("none", "every-block", "every-nth", "every-nth checkpointing.n=3", "segments", "mlp", "attention",
                      "selective", "selective checkpointing.keep=attention",
                      "selective checkpointing.keep=every-other-matmul"),
    "compile": ("off", "per-block"),
    "loss": ("plain", "chunked"),
    "attention": ("eager", "sdpa"),
    "precision": ("fp32", "bf16", "bf16-pure", "fp8"),
}
LOW, HIGH = 2, 8
"""Micro-batches between which a sample's bytes are counted."""


def cost(evaluate: InProcess, model: str, gpu: str, changes: tuple[str, ...]) -> tuple[float, float] | None:
    """Bytes that a sample adds to the peak of the passes, and seconds of a step; None where the GPU cannot serve."""
    device = find_device(gpu)
    found: list[Evaluated] = []
    for micro in (LOW, HIGH):
        recipe = load_recipe(model, [*USUAL, f"micro_batch_size={micro}", *changes], cuda=True)
        if recipe.refusals(device):
            return None
        outcome = evaluate.one(resolve(recipe, device), device)
        if not isinstance(outcome, Evaluated):
            raise outcome
        found.append(outcome)
    return (found[1].passes - found[0].passes) / (HIGH - LOW), found[1].seconds


def main() -> None:
    backend = load_backend("pytorch")
    evaluate = InProcess(standard_tools(backend))
    shares: dict[str, dict[str, list[float]]] = {}
    for model, gpu in CASES:
        for slot, variants in VARIANTS.items():
            costs = {name: found for name in variants
                     if (found := cost(evaluate, model, gpu, tuple(f"{slot}={name}".split()))) is not None}
            plainest = costs[variants[0]]
            for name, (kept, seconds) in costs.items():
                share = shares.setdefault(f"{slot}={name}", {"keeps": [], "slowdown": []})
                share["keeps"].append(kept / plainest[0])
                share["slowdown"].append(seconds / plainest[1] - 1)
                print(f"{model} {slot}={name}: keeps {share['keeps'][-1]:.2f}, slowdown {share['slowdown'][-1]:+.2f}")
    facts: dict[str, Any] = {name: {fact: {"median": median(values), "by_model": values}
                                    for fact, values in share.items()} for name, share in shares.items()}
    write("technique_facts", {"models": [model for model, _ in CASES], "facts": facts})


if __name__ == "__main__":
    main()

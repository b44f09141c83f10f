"""The rules of thumb for memory, in bytes per parameter, beside what the step itself is predicted to hold.

    python benchmarks/rules_of_thumb.py     under a minute on two cores; no GPU, and no parameter is allocated

The model is a decoder of 0.38 billion parameters with a small vocabulary, so that its blocks are nearly all of it; the
states of three billion parameters are those of a wider one. Sequences are short, and activations are a category of
their own: they are not what the rules are about. Written to results/rules_of_thumb.json, from which
docs/rules_of_thumb.md is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from record import write
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.model_size import model_size
from tightfit.devices import Device, find_device
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.trace import Allocation, Category, Trace, live_bytes

NARROW = {
    "num_hidden_layers": 6, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 4096,
}  # fmt: skip
WIDE = {
    "num_hidden_layers": 3, "hidden_size": 8192, "intermediate_size": 32768, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 8192,
}  # fmt: skip
MODEL, GPU = "mistral-7b", "h100-sxm"

Read = Callable[[Trace], int]
"""Bytes of a trace that a rule is about."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule and how it is put to the test.

    rule: as published, in bytes per parameter; `bytes` the same as a number.
    recipe: what the prediction is made for. read: what of it is compared.
    why: why they differ, or why they do not.
    """

    what: str
    rule: str
    bytes: float
    read: Read
    recipe: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


def most(trace: Trace, counts: Callable[[Allocation], bool]) -> int:
    """The most bytes of such allocations at once, in the last step or in all of inference."""
    ticks, live = live_bytes([a for a in trace.allocations if counts(a)])
    steps = [span for span in trace.spans if span.name.startswith("step ")] or trace.spans
    start = steps[-1].start if steps[-1].step else steps[0].start
    inside = (ticks >= start) & (ticks < steps[-1].stop)
    before = live[ticks < start][-1:]
    return int(max([*live[inside], *before], default=0))


def of(category: Category) -> Read:
    """What a category holds at its most."""
    return partial(most, counts=lambda a: a.category is category)


def with_copies(trace: Trace) -> int:
    """Weights, and the copies of them that autocast keeps while it is needed."""
    weights = {a.shape for a in trace.allocations if a.category is Category.WEIGHTS}
    return most(trace, lambda a: a.category is Category.WEIGHTS or (
        a.category is Category.TEMPORARY and a.op.startswith("aten._to_copy") and a.shape in weights
    ))  # fmt: skip


def all_in(trace: Trace) -> int:
    """Everything but activations and inputs."""
    return most(trace, lambda a: a.category not in (Category.ACTIVATIONS, Category.OTHER, Category.KV_CACHE))


BF16, PURE = {"precision": "bf16"}, {"precision": {"name": "bf16-pure", "rounding": "stochastic"}}
INFERENCE = {"mode": "inference", "inference": 4, "batch_size": 1}
FACTORED = ("the rule counts a momentum beside the factored mean of squares; torch's Adafactor has none, only a row "
            "and a column for each matrix")
EIGHT_BIT = ("one fp32 scale for every 256 values of each state adds 0.03 bytes a parameter, and the embedding keeps "
             "32-bit states, 8 bytes a parameter (Dettmers et al. 2022)")
NOT_CAST = "the embedding is looked up, not multiplied, and norms stay in fp32: of those there is no copy"

RULES: tuple[Rule, ...] = (
    Rule(what="weights, fp32", rule="4", bytes=4, read=of(Category.WEIGHTS), recipe={"precision": "fp32"}),
    Rule(
        what="weights, mixed fp16 or bf16 (fp32 master and half copy)", rule="6", bytes=6, read=with_copies,
        recipe=BF16,
        why="autocast keeps no standing copy: one is made as a weight is first used, kept for the backward pass, and "
            f"gone with it, so that 4 bytes stay between steps; {NOT_CAST}",
    ),
    Rule(what="weights, pure bf16", rule="2", bytes=2, read=of(Category.WEIGHTS), recipe=PURE),
    Rule(what="gradients, fp32", rule="4", bytes=4, read=of(Category.GRADIENTS), recipe={"precision": "fp32"}),
    Rule(
        what="gradients, mixed", rule="4", bytes=4, read=of(Category.GRADIENTS), recipe=BF16,
        why="autocast's copies have bf16 gradients, which become fp32 ones at the weights",
    ),
    Rule(what="gradients, pure bf16", rule="2", bytes=2, read=of(Category.GRADIENTS), recipe=PURE),
    Rule(what="states, AdamW", rule="8", bytes=8, read=of(Category.OPTIMIZER), recipe={**BF16, "optimizer": "adamw"}),
    Rule(
        what="states, bf16 AdamW", rule="4", bytes=4, read=of(Category.OPTIMIZER),
        recipe={**BF16, "optimizer": "adamw-anyprecision"},
    ),
    Rule(what="states, Lion", rule="4", bytes=4, read=of(Category.OPTIMIZER), recipe={**BF16, "optimizer": "lion"}),
    Rule(
        what="states, Adafactor", rule="slightly over 4", bytes=4, read=of(Category.OPTIMIZER),
        recipe={**BF16, "optimizer": "adafactor"},
        why=FACTORED,
    ),
    Rule(
        what="states, SGD with momentum", rule="4", bytes=4, read=of(Category.OPTIMIZER),
        recipe={**BF16, "optimizer": "sgd"},
    ),
    Rule(
        what="states, 8-bit AdamW", rule="2", bytes=2, read=of(Category.OPTIMIZER),
        recipe={**BF16, "optimizer": "adamw-8bit"},
        why=EIGHT_BIT,
    ),
    Rule(
        what="mixed-precision AdamW training, without activations", rule="18", bytes=18, read=all_in,
        recipe={**BF16, "batch_size": 1},
        why="the rule adds the half copies to gradients and states; they die in the backward pass as the gradients are "
            "made, so that both are never whole at once",
    ),
    Rule(
        what="the same with gradient accumulation", rule="18", bytes=18, read=all_in,
        recipe={**BF16, "batch_size": 2, "micro_batch_size": 1},
        why="here gradients are already whole while the next micro-batch makes the copies again; less the embedding, "
            "which has no copy",
    ),
    Rule(
        what="pure bf16 with bf16 AdamW, all in", rule="8", bytes=8, read=all_in, recipe=PURE,
        why="with stochastic rounding, which keeps nothing more; the temporary values of one parameter's update come "
            "on top",
    ),
    Rule(
        what="the same with Kahan summation", rule="8", bytes=8, read=all_in,
        recipe={"precision": {"name": "bf16-pure", "rounding": "kahan"}},
        why="the lost part of every update is kept in one more bf16 value a parameter",
    ),
    Rule(
        what="mixed-precision inference", rule="6", bytes=6, read=all_in, recipe={**INFERENCE, **BF16},
        why=f"autocast keeps the copies as long as it is entered; {NOT_CAST}",
    ),
    Rule(
        what="full half-precision inference", rule="2", bytes=2, read=all_in,
        recipe={**INFERENCE, "precision": "bf16-pure"},
    ),
)

STATES_OF_3B: tuple[Rule, ...] = tuple(
    Rule(what=what, rule=rule, bytes=size, read=of(Category.OPTIMIZER), recipe={**BF16, "optimizer": name}, why=why)
    for what, rule, size, name, why in (
        ("states of 3 billion parameters in GB, AdamW", "24", 24, "adamw", ""),
        ("states of 3 billion parameters in GB, Adafactor", "12 and a little", 12, "adafactor", FACTORED),
        ("states of 3 billion parameters in GB, 8-bit AdamW", "6", 6, "adamw-8bit", EIGHT_BIT),
    )
)
"""Optimizer states of a model of three billion parameters, in GB."""


class Predictions:
    """Traces of one model, each made once."""

    def __init__(self, overrides: Mapping[str, Any], device: Device) -> None:
        self.overrides = dict(overrides)
        self.device = device
        self.parameters = model_size(self._recipe({})).parameters
        self._traces: dict[str, Trace] = {}

    def bytes(self, rule: Rule) -> int:
        """Bytes that the rule is about."""
        recipe = resolve(self._recipe(rule.recipe), self.device)
        key = repr(recipe.to_dict())
        if key not in self._traces:
            self._traces[key] = PytorchBackend().predict(recipe, self.device)
        return rule.read(self._traces[key])

    def per_parameter(self, rule: Rule) -> float:
        """The same in bytes per parameter."""
        return self.bytes(rule) / self.parameters

    def _recipe(self, changes: Mapping[str, Any]) -> Recipe:
        return Recipe.from_dict({
            "model": MODEL, "model_overrides": self.overrides, "data": "dummy", "seq_len": 64, "batch_size": 1,
            **changes,
        })  # fmt: skip


def row(rule: Rule, predicted: float) -> dict[str, Any]:
    """A row of the table, printed as it is made."""
    print(f"{rule.what:<60} {rule.rule:>16} {predicted:8.3f}", flush=True)
    return {"what": rule.what, "rule": rule.rule, "predicted": round(predicted, 3), "recipe": dict(rule.recipe),
            "why": rule.why}  # fmt: skip


def main() -> None:
    began = time.perf_counter()
    device = find_device(GPU)
    narrow, wide = Predictions(NARROW, device), Predictions(WIDE, device)
    rows = [row(rule, narrow.per_parameter(rule)) for rule in RULES]
    states = [row(rule, wide.bytes(rule) / 1e9) for rule in STATES_OF_3B]
    seconds = time.perf_counter() - began
    path = write("rules_of_thumb", {
        "device": device.name, "seconds": round(seconds, 1), "model": MODEL,
        "bytes_per_parameter": {"model_overrides": NARROW, "parameters": narrow.parameters, "rows": rows},
        "states_gb": {"model_overrides": WIDE, "parameters": wide.parameters, "rows": states},
    })  # fmt: skip
    print(f"{seconds:.0f} s; wrote {path}")


if __name__ == "__main__":
    main()

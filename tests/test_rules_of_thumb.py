"""The rules of thumb come out of predictions, at a small size as at the recorded one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rules_of_thumb import RULES, STATES_OF_3B, Predictions, most
from tightfit.devices import find_device
from tightfit.trace import Allocation, Category, Span, Trace

SMALL = {
    "num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128,
}  # fmt: skip
RECORD = json.loads((Path(__file__).parents[1] / "results" / "rules_of_thumb.json").read_text())

EXPECTED = {
    "weights, fp32": 4, "weights, mixed fp16 or bf16 (fp32 master and half copy)": 6, "gradients, mixed": 4,
    "states, AdamW": 8, "states, Lion": 4, "states, SGD with momentum": 4,
    "mixed-precision AdamW training, without activations": 16, "the same with gradient accumulation": 18,
    "mixed-precision inference": 6, "full half-precision inference": 2,
}  # fmt: skip
"""Bytes per parameter; of what is slow to trace, the recorded figures are checked alone."""


@pytest.fixture(scope="module")
def small() -> Predictions:
    return Predictions(SMALL, find_device("h100-sxm"))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.what in EXPECTED], ids=lambda rule: rule.what)
def test_a_rule_comes_out_of_the_step_itself(small, rule):
    assert small.per_parameter(rule) == pytest.approx(EXPECTED[rule.what], rel=0.05)


def test_the_record_holds_every_rule_and_keeps_to_it_or_says_why():
    rows = [*RECORD["bytes_per_parameter"]["rows"], *RECORD["states_gb"]["rows"]]
    assert [row["what"] for row in rows] == [rule.what for rule in (*RULES, *STATES_OF_3B)]
    for row, rule in zip(rows, (*RULES, *STATES_OF_3B), strict=True):
        assert row["why"] == rule.why
        if not rule.why:
            assert row["predicted"] == pytest.approx(rule.bytes, rel=0.005), rule.what


def test_the_most_of_some_memory_is_of_the_last_step_alone():
    trace = Trace(
        origin="predicted",
        allocations=[
            Allocation(born=1, died=None, bytes=4, category=Category.WEIGHTS),
            Allocation(born=2, died=4, bytes=100, category=Category.GRADIENTS),
            Allocation(born=6, died=8, bytes=3, category=Category.GRADIENTS),
            Allocation(born=7, died=9, bytes=3, category=Category.GRADIENTS),
        ],
        spans=[Span(name="step 1", start=1, stop=5, step=1), Span(name="step 2", start=5, stop=10, step=2)],
    )
    assert most(trace, lambda a: a.category is Category.GRADIENTS) == 6
    assert most(trace, lambda a: a.category is Category.WEIGHTS) == 4

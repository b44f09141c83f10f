"""What packed documents cost where attention has dropout, for which torch's variable-length kernel has none."""

from __future__ import annotations

import re

import pytest

from tightfit.backends import load_backend
from tightfit.devices import find_device
from tightfit.planning.search.search import search
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe import Recipe

PINNED = {
    "model": "gpt2", "model_overrides": {"n_layer": 2, "n_head": 4, "n_embd": 256, "n_positions": 2048},
    "vocab_size": 512, "seq_len": 2048, "batch_size": 4, "micro_batch_size": 4, "precision": "bf16",
    "optimizer": "adamw", "attention": "sdpa", "loss": "plain", "checkpointing": "none", "compile": "off",
    "offload": "none", "expandable_segments": False, "data": "notes.txt",
}  # fmt: skip


@pytest.mark.parametrize(("dropout", "packing", "attention"), [
    (0.1, True, "sdpa"), (0.0, True, "sdpa"), (0.1, False, "sdpa"), (0.1, True, "eager"),
])  # fmt: skip
def test_a_plan_says_what_the_mask_costs(dropout, packing, attention):
    overrides = {**PINNED["model_overrides"], "attn_pdrop": dropout}
    recipe = Recipe.from_dict({**PINNED, "attention": attention, "model_overrides": overrides,
                               "data": {"source": "notes.txt", "packing": packing}})  # fmt: skip
    plan = search(recipe, find_device("rtx-3090"), standard_tools(load_backend("pytorch")))
    found = [note for note in plan.notes if "in place of" in note]
    assert len(found) == (dropout > 0 and packing and attention == "sdpa")
    if found:
        faster, slower = (float(text.replace(",", "")) for text in
                          re.search(r"([\d,]+) tokens/s in place of ([\d,]+)", found[0]).groups())
        assert "model_overrides.attn_pdrop=0" in found[0]
        assert faster > 1.02 * slower
        assert slower == round(plan.chosen.estimate.time.throughput)

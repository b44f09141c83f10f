"""Numerics: the mildest change that serves, the same on every GPU, and the smallest GPU of a stated recipe."""

from __future__ import annotations

import pytest

from tests.planning.ops import gpu
from tests.planning.search.declared import GIB, Declared
from tightfit.devices import find_device
from tightfit.planning.costs import FitRank
from tightfit.planning.estimate import Margin
from tightfit.planning.search.every_gpu import compare
from tightfit.planning.search.search import search
from tightfit.planning.search.space import Space
from tightfit.recipe import Recipe

MARGIN = Margin(share=0.0, fixed=0)
COMMON = {"vocab_size": 50_304, "batch_size": 16, "compile": "off", "attention": "sdpa", "loading": {"workers": 2},
          "expandable_segments": False, "loss": "plain"}
SPEEDS = {("bf16", "adamw"): 11_000, ("fp32", "adamw"): 4_000, ("fp32", "adamw-8bit"): 4_000,
          ("bf16", "adamw-8bit"): 10_506, ("bf16", "adamw-anyprecision"): 10_400, ("bf16-pure", "adamw"): 13_181,
          ("bf16-pure", "adamw-8bit"): 13_600, ("bf16", "adamw-4bit"): 10_700, ("bf16-pure", "adamw-4bit"): 13_800}
"""Tokens a second: a harsher change gains 5 % and less where weights are 16 bits already."""


def of(model, gib, catalogue=(), **fields):
    return search(Recipe.from_dict({**COMMON, **fields}), gpu(gib * GIB), model.tools(MARGIN),
                  catalogue=catalogue)


def picked(plan):
    return plan.recipe.precision.name, plan.recipe.optimizer.name


@pytest.mark.parametrize(("gib", "expected"), [
    (40, ("bf16", "adamw")),  # 18 bytes a parameter
    (15, ("bf16-pure", "adamw")),  # with 8-bit states 12 bytes fit too, and are a quarter slower
    (9.5, ("bf16-pure", "adamw")),  # 8 bytes
    (7.5, ("bf16-pure", "adamw-8bit")),  # 6 bytes
    (5.8, ("bf16-pure", "adamw-4bit")),  # 5 bytes, and nothing milder
])
def test_the_mildest_change_that_serves_is_chosen(gib, expected):
    plan = of(Declared(parameters=1.07e9, sample=0.2 * GIB, speeds=SPEEDS), gib)
    assert picked(plan) == expected


def test_a_harsher_change_has_to_gain_more_than_the_clocks_error_and_milder_ones_are_shown():
    plan = of(Declared(parameters=1.07e9, sample=0.2 * GIB, speeds=SPEEDS), 15)
    shown = {(c.recipe.precision.name, c.recipe.optimizer.name) for c in plan.candidates
             if c.estimate.fit_rank is FitRank.SAFE}
    assert shown & {("bf16", "adamw-8bit"), ("bf16", "adamw-anyprecision")}
    assert "changes them least of what fits" in plan.answers.why
    assert "% slower" in plan.answers.why
    close = {**SPEEDS, ("bf16-pure", "adamw"): 10_600, ("bf16-pure", "adamw-8bit"): 10_600,
             ("bf16-pure", "adamw-4bit"): 10_600}
    assert picked(of(Declared(parameters=1.07e9, sample=0.2 * GIB, speeds=close), 15)) == ("bf16", "adamw-8bit")


def test_a_pinned_optimizer_leaves_the_weights_format_open():
    plan = of(Declared(parameters=1.07e9, sample=0.2 * GIB, speeds=SPEEDS), 7.5, optimizer="adamw-8bit")
    assert picked(plan) == ("bf16-pure", "adamw-8bit")
    assert plan.chosen.changes_numerics == ("precision=bf16-pure",)


@pytest.mark.parametrize("allowed", [False, True])
def test_numerics_stay_where_the_recipe_fits_unless_it_allows_a_change_that_gains(allowed):
    plan = of(Declared(parameters=1.07e9, sample=0.2 * GIB, speeds=SPEEDS), 40, allow_numerics=allowed)
    assert picked(plan) == (("bf16-pure", "adamw") if allowed else ("bf16", "adamw"))


@pytest.mark.parametrize(("allowed", "expected"), [(False, ("bf16", "adamw")), (True, ("bf16-pure", "adamw"))])
def test_blocks_wait_in_host_memory_before_numerics_change_unless_they_may(allowed, expected):
    model = Declared(parameters=1.07e9, sample=0.2 * GIB, speeds=SPEEDS, streamed=0.3)
    plan = of(model, 9.5, allow_numerics=allowed)
    assert picked(plan) == expected
    assert plan.recipe.offloaded.needs_by_block is not allowed
    shown = {candidate.changes_numerics for candidate in plan.candidates if candidate.estimate.fit_rank is FitRank.SAFE}
    assert allowed or shown > {()}  # what they would give stands beside it
    assert plan.answers.why.endswith("numerics as they are.") is not allowed
    (row,) = compare(Recipe.from_dict({**COMMON, "allow_numerics": allowed}), [gpu(9.5 * GIB)], model.tools()).rows
    assert row.chosen.changes_numerics == ()


def test_the_smallest_gpu_belongs_to_a_stated_recipe():
    cards = [gpu(gib * GIB, f"{gib} GB card") for gib in (8, 12, 20, 48)]
    model = Declared(parameters=1.07e9, sample=0.2 * GIB, speeds=SPEEDS)
    roomy = of(model, 80, catalogue=cards).answers
    assert roomy.smallest_gpu.name == "20 GB card"
    assert roomy.smallest_gpu_changed_text == ""
    for gib in (15, 9.5):  # whatever card was asked about
        tight = of(model, gib, catalogue=cards).answers
        assert tight.smallest_gpu.name == "20 GB card"
        assert tight.smallest_gpu_changed_text.startswith("With precision=bf16-pure, which changes numerics: ")
    tiny = of(model, 4, catalogue=cards)
    assert tiny.chosen is None
    assert tiny.answers.smallest_gpu.name == "20 GB card"
    assert "8 GB card" in tiny.answers.smallest_gpu_changed_text
    assert tiny.candidates[0].estimate.missing == min(c.estimate.missing for c in tiny.candidates)


def test_adapters_need_least_memory_in_16_bits():
    """What the precision adds to a few factors is nothing beside what it saves of the backward pass."""
    for trainable, precision in (("lora", "bf16"), ("all", "fp32")):
        recipe = Recipe.from_dict({"batch_size": 4, "compile": "off", "offload": "none", "trainable": trainable})
        assert Space(recipe, find_device("rtx-4090")).least_memory_recipe().precision.name == precision


def test_what_does_not_fit_names_adapters_and_takes_none():
    model = Declared(parameters=8.03e9, sample=0.2 * GIB, speeds=SPEEDS)
    plan = of(model, 10)
    assert plan.chosen is None
    told = plan.answers.adapters
    assert told in plan.to_json()["candidates"][0]["reasons"]
    assert "trainable=lora would take 15.9 GiB, which does not fit" in told
    assert "trainable=lora base=nf4 would take 4.8 GiB, with micro_batch_size=1" in told
    traced, far = plan.predictions, of(model, 2)
    assert "trainable=lora would take more than 15.0 GiB, which does not fit" in far.answers.adapters
    assert far.predictions < traced
    assert of(model, 200).answers.adapters == ""
    assert of(model, 3, trainable="lora").answers.adapters == ""


def test_gpus_are_compared_like_with_like():
    """A small one with changed numerics is no match for a large one without."""
    model = Declared(parameters=1.07e9, sample=0.2 * GIB, speeds=SPEEDS)
    recipe = Recipe.from_dict({**COMMON, "allow_numerics": True})
    rows = compare(recipe, [gpu(15 * GIB, "small"), gpu(40 * GIB, "large")], model.tools()).rows
    assert [row.device.name for row in rows] == ["large", "small"]
    assert rows[0].chosen.changes_numerics == ()
    assert rows[1].chosen.changes_numerics == ("optimizer=adamw-8bit",)


def test_a_recipe_that_pins_every_field_is_told_what_opening_them_would_gain():
    pins = {"precision": "fp32", "optimizer": "adamw", "checkpointing": "every-block", "micro_batch_size": 1}
    model = Declared(parameters=1.07e9, sample=0.2 * GIB, speeds=SPEEDS)
    plan = of(model, 40, **pins)
    told = "Left open, micro_batch_size, precision, checkpointing would give at least 11,0"
    assert plan.answers.open_fields.startswith(told)
    assert plan.answers.open_fields in plan.reasons
    assert len(model.calls) <= 4
    assert of(model, 40, **{**pins, "precision": "bf16", "checkpointing": "none"}).answers.open_fields == ""
    undecayed = {"name": "adamw", "implementation": "foreach", "weight_decay": 0.0}
    told = of(model, 40, **{**pins, "optimizer": undecayed}).answers.open_fields
    assert told.endswith("checkpointing=none optimizer.implementation=auto.")


def test_the_catalogues_cards_order_by_what_fits():
    """An 8-billion-parameter model needs a card of 141 GB with numerics kept, wherever it is asked from."""
    cards = [find_device(name) for name in ("a100-80gb-sxm", "h100-sxm", "h200")]
    model = Declared(parameters=8.03e9, sample=0.4 * GIB, speeds=SPEEDS)
    for card in cards[:2]:
        recipe = Recipe.from_dict({**COMMON, "batch_size": 4})
        answers = search(recipe, card, model.tools(), catalogue=cards).answers
        assert answers.smallest_gpu.name == cards[2].name

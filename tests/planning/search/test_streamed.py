"""Recipes whose blocks wait in host memory: which are tried, and how much of them stays on the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.display.plans import CARD, GIB, streamed
from tightfit.planning.search.streamed import faster, with_shares
from tightfit.planning.search.streamed import streamed as streamed_recipes
from tightfit.recipe import Recipe


def first(**memory):
    """A plan of one streamed candidate, with other figures of memory: 7 GiB of 23 are in use, 48 GiB lie outside."""
    plan = streamed()
    (moving,) = plan.candidates[1:]
    cost = replace(moving.estimate, memory=replace(moving.estimate.memory, **memory))
    moving = replace(moving, estimate=cost)
    return replace(plan, candidates=(moving,), chosen=moving)


def test_weights_stay_first_then_gradients_then_states():
    shares = [(offload.weights, offload.gradients, offload.optimizer)
              for reserved in (19, 13, 7) for offload in [with_shares(first(peak_reserved=reserved * GIB)).offload]]

    assert shares == [(0.75, 1.0, 1.0), (0.25, 1.0, 1.0), (0.0, 0.75, 1.0)]


@pytest.mark.parametrize("memory", [{"peak_reserved": 22 * GIB}, {"missing": GIB}], ids=["no room", "too large"])
def test_nothing_is_changed_where_there_is_no_room(memory):
    assert with_shares(first(**memory)) is None


def test_nothing_is_changed_where_copies_are_hidden_and_the_host_suffices():
    plan = first()
    time = plan.chosen.estimate.time
    hidden = replace(plan.chosen, estimate=replace(plan.chosen.estimate,
                                                   time=replace(time, copies=replace(time.copies, added=0.0))))
    lacking = replace(hidden, estimate=replace(hidden.estimate,
                                               memory=replace(hidden.estimate.memory, host_missing=GIB)))

    assert with_shares(replace(plan, candidates=(hidden,))) is None
    assert with_shares(replace(plan, candidates=(lacking,))) is not None


def test_what_the_host_lacks_has_to_find_room_on_the_device():
    assert with_shares(first(host_missing=15 * GIB)) is not None
    assert with_shares(first(host_missing=16 * GIB)) is None


def test_the_faster_plan_is_one_with_a_choice():
    plan = first()

    assert faster(replace(plan, chosen=None), plan) is plan
    assert faster(plan, replace(plan, chosen=None)) is plan


def test_embeddings_are_the_last_to_leave():
    recipe = Recipe.from_dict({"model": "gpt2", "batch_size": 64, "data": {"source": "dummy"}})
    tried = [(r.micro_batch_size, r.offload.embeddings) for r in streamed_recipes(recipe, CARD)]

    assert tried[0] == (64, False)
    assert tried[-1] == (4, True)
    assert [embeddings for _, embeddings in tried].count(True) == 1
    assert list(streamed_recipes(recipe.override(offload="none"), CARD)) == []

"""The most that fits: what is asked about, by few traces, and what is said of it."""

from __future__ import annotations

import itertools

import pytest

from tests.display.plans import CARD, memory
from tests.display.plans import estimate as estimate_made
from tightfit.backends.measurements import ModelSize
from tightfit.devices import find_device
from tightfit.errors import ModelError, RecipeError
from tightfit.planning.costs import FitRank
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.extremes import candidates, find_largest, models_like
from tightfit.recipe import Recipe

GPT2 = Recipe.from_dict({"model": "gpt2", "batch_size": 8})
GIB = 1 << 30
SIZES = {name: number for number, name in enumerate(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), start=1)}


def model_size(recipe):
    return ModelSize(parameters=SIZES[recipe.model], active_parameters=0, flops=0, values=0)


def costing(needed, host_missing=lambda recipe: 0, cached=1.0, gradients=0):
    """An evaluator by whose figures a recipe needs `needed(recipe)` GiB, its margin included, and lacks so many of the
    host's. cached: times as much is reserved where there is room. gradients: GiB of them, beside samples of 1 GiB."""
    asked = []

    def evaluate(jobs):
        [(recipe, _)] = jobs
        asked.append(recipe)
        cost = estimate_made()
        lacks, takes = host_missing(recipe) * GIB, round(needed(recipe) * GIB)
        tensors = takes - 2 * GIB  # 1 of context, 1 of margin
        held = memory(peak_allocated=tensors, peak_reserved=round(tensors * cached), host_missing=lacks,
                      device_rank=FitRank.NONE if lacks or takes > CARD.memory_bytes else FitRank.SAFE)
        object.__setattr__(cost, "memory", held)
        return [Evaluated(recipe=recipe, estimate=cost, passes=GIB, outside=0, held=0,
                          gradients=gradients * GIB, parameters=0, events=0)]

    return evaluate, asked


def test_what_is_asked_about():
    lengths = candidates(GPT2, "seq_len", model_size)
    assert list(lengths) == [128, 256, 384, 512, 640, 768, 896, 1024]
    assert lengths[256].seq_len == 256
    assert not lengths[256].data.packing  # of one document
    few, many = (list(candidates(GPT2.override(model_overrides={"n_positions": n}), "seq_len", model_size))
                 for n in (77, 100_000))
    assert few == list(range(1, 78))
    assert many[-1] == 100_000
    assert many[:64] == [128 * n for n in range(1, 65)]
    assert all(a < b <= a + max(a / 64, 128) for a, b in itertools.pairwise(many))
    assert list(candidates(GPT2, "micro_batch_size", model_size)) == list(range(1, 9))
    models = candidates(GPT2, "model=gpt2*", model_size)
    assert [recipe.model for recipe in models.values()] == list(SIZES)
    assert models_like("qwen2.5-*") == [f"qwen2.5-{size}b" for size in ("0.5", "1.5", "7", "14", "32")]


@pytest.mark.parametrize(("asked", "says"), [
    ("batch", "'batch' is not seq_len, micro_batch_size, or model="), ("model=", "is not seq_len"),
    ("model=qwen9-*", "no bundled model; did you mean"), ("seq_len=9", "is not seq_len"),
])
def test_other_questions_say_what_to_write(asked, says):
    with pytest.raises(RecipeError, match=says):
        candidates(GPT2, asked, model_size)


def test_pictures_have_no_length():
    with pytest.raises(RecipeError, match="write --largest micro_batch_size"):
        candidates(Recipe.from_dict({"model": "vit-base", "task": "image-classification"}), "seq_len", model_size)


def test_the_longest_sequence_by_few_traces():
    evaluate, asked = costing(lambda recipe: 4 + recipe.seq_len / 32)
    recipe, most = find_largest("seq_len", candidates(GPT2, "seq_len", model_size), CARD, evaluate)
    assert recipe.seq_len == most.value == 640
    assert len(asked) == most.traces <= 6
    assert all(each.checkpointing.name == "every-block" and each.micro_batch_size == 1 for each in asked)
    assert most.text == ("seq_len=640 fits with the lowest-memory settings, 23.0 GiB in use, a document a row "
                         "(data.packing=false); seq_len=768 would take 27.0 GiB.")
    assert all(each.offload.name == "none" or each.seq_len > 640 for each in asked)


def test_a_longest_sequence_that_is_the_models_own_is_asked_about_once_it_is_likely():
    evaluate, asked = costing(lambda recipe: 4 + recipe.seq_len / 128)
    _, most = find_largest("seq_len", candidates(GPT2, "seq_len", model_size), CARD, evaluate)
    assert most.value == 1024
    assert [each.seq_len for each in asked] == [512, 1024]


def test_what_does_not_fit_with_blocks_in_host_memory_may_fit_without():
    evaluate, _ = costing(lambda recipe: (30 if recipe.offloaded.needs_by_block else 4) + recipe.seq_len / 32)
    recipe, most = find_largest("seq_len", candidates(GPT2, "seq_len", model_size), CARD, evaluate)
    assert recipe.seq_len == most.value == 640


def test_a_card_that_is_full_does_not_mislead():
    """Of what fits with cached memory given back, the allocator takes all there is, whatever the length."""
    evaluate, asked = costing(lambda recipe: 4 + recipe.seq_len / 4096, cached=1.5)
    many = GPT2.override(model_overrides={"n_positions": 131072})
    recipe, most = find_largest("seq_len", candidates(many, "seq_len", model_size), CARD, evaluate)
    assert 80_000 < recipe.seq_len == most.value <= 81_920
    assert len(asked) <= 5
    assert "fits with the lowest-memory settings, 24.0 GiB in use" in most.text


def test_optimizer_states_stay_on_the_gpu_where_host_memory_has_no_room():
    evaluate, asked = costing(lambda recipe: (4 if recipe.offload.name == "host" else 8) + recipe.seq_len / 32,
                              lambda recipe: recipe.offload.name == "host")
    recipe, most = find_largest("seq_len", candidates(GPT2, "seq_len", model_size), CARD, evaluate)
    assert recipe.seq_len == 512
    assert most.traces == len(asked)
    assert {each.offload.name for each in asked} == {"host", "none"}


def test_the_largest_model_and_nothing_larger():
    evaluate, asked = costing(lambda recipe: 3 + SIZES[recipe.model])
    recipe, most = find_largest("model=gpt2*", candidates(GPT2, "model=gpt2*", model_size), CARD, evaluate)
    assert (recipe.model, most.value, len(asked)) == ("gpt2-xl", "gpt2-xl", 1)
    assert most.text.endswith("in use, and none of them is larger.")


def test_weights_that_exceed_the_card_are_not_traced_without_host_memory():
    def large(recipe):
        return ModelSize(parameters=2 * GIB * SIZES[recipe.model], active_parameters=0, flops=0, values=0)

    evaluate, asked = costing(lambda recipe: 10 * SIZES[recipe.model])
    _, most = find_largest("model=gpt2*", candidates(GPT2, "model=gpt2*", large), CARD, evaluate)
    assert most.value == "gpt2-medium"
    assert [each.model for each in asked] == ["gpt2-xl", "gpt2-medium", "gpt2-large"]


def test_the_whole_global_batch_may_need_less_than_a_part_of_it():
    evaluate, asked = costing(lambda recipe: 12 if recipe.micro_batch_size == recipe.batch_size else
                              20 + 2 * recipe.micro_batch_size)
    _, most = find_largest("micro_batch_size", candidates(GPT2, "micro_batch_size", model_size), CARD, evaluate)
    assert (most.value, most.traces, len(asked)) == (8, 1, 1)
    assert most.text.endswith("in use, and batch_size is no more.")


@pytest.mark.parametrize(("gradients", "longest"), [(2, 896), (1, 640)])
def test_a_longer_sequence_may_fit_where_no_gradients_wait_for_the_next_micro_batch(gradients, longest):
    evaluate, _ = costing(lambda recipe: (0 if recipe.micro_batch_size == 8 else 8) + recipe.seq_len / 40,
                          gradients=gradients)
    pinned = GPT2.override(offload="none")
    recipe, most = find_largest("seq_len", candidates(pinned, "seq_len", model_size), CARD, evaluate)
    assert recipe.seq_len == most.value == longest
    assert "would take 24.6 GiB" in most.text or "would take 26.2 GiB" in most.text


def test_where_not_even_the_smallest_fits():
    evaluate, _ = costing(lambda recipe: 30)
    recipe, most = find_largest("micro_batch_size", candidates(GPT2, "micro_batch_size", model_size), CARD, evaluate)
    assert (recipe.micro_batch_size, most.value) == (1, None)
    assert most.text == "Not even micro_batch_size=1 fits with the lowest-memory settings: it takes 29.0 GiB."


def test_host_memory_that_is_not_there_counts():
    evaluate, _ = costing(lambda recipe: 4 + recipe.micro_batch_size,
                          lambda recipe: max(0, recipe.micro_batch_size - 5))
    pinned = GPT2.override(offload="host")
    recipe, most = find_largest("micro_batch_size", candidates(pinned, "micro_batch_size", model_size), CARD, evaluate)
    assert recipe.micro_batch_size == most.value == 5
    assert most.text == ("micro_batch_size=5 fits with the lowest-memory settings, 8.0 GiB in use; "
                         "micro_batch_size=6 would take 9.0 GiB, and 1.0 GiB more than the host has.")


def test_what_cannot_be_traced_is_an_error_where_nothing_can():
    with pytest.raises(ModelError, match="no"):
        find_largest("seq_len", candidates(GPT2, "seq_len", model_size), find_device("l4"),
                     lambda jobs: [ModelError("no")])

"""A combination at any micro-batch from two traces, and what one change of it does to another: on a toy with a closed
form, where both are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.toy import Toy
from tightfit.devices import Device
from tightfit.planning.defaults import resolve
from tightfit.planning.search.evaluate import InProcess
from tightfit.planning.search.forecast import Affine, CostModel, Forecasts
from tightfit.planning.search.space import Space
from tightfit.recipe import Recipe
from tightfit.techniques.checkpointing import EveryBlock, MemoryBudget, Selective
from tightfit.techniques.compile import NoCompile, PerBlock

BATCH = 32
DEVICE = Device(kind="cuda", name="toy", memory_bytes=1 << 40, capability=(8, 0))


def costs(toy, *micros, **fields):
    recipe = resolve(Recipe.from_dict({"batch_size": BATCH, "loading": {"workers": 2}, **fields}), DEVICE)
    evaluate = InProcess(toy.tools()).one
    return {micro: evaluate(recipe.model_copy(update={"micro_batch_size": micro}), DEVICE) for micro in micros}


@pytest.mark.parametrize("seed", [3, 12, 22])
@pytest.mark.parametrize("kind", ["none", "every-block"])
def test_two_points_tell_the_others(seed, kind):
    toy = Toy.drawn(seed)
    fit = CostModel.of(costs(toy, 2, 8, checkpointing=kind), BATCH, None)
    for micro, found in costs(toy, 1, 4, 16, checkpointing=kind).items():
        assert fit.peak(micro, BATCH) == pytest.approx(max(found.passes, found.outside), rel=0.01)
        assert fit.step_seconds(micro, BATCH) == pytest.approx(found.seconds, rel=0.01)


def test_the_only_micro_batch_of_a_step_finds_no_gradients():
    toy = Toy.drawn(12)
    fit = CostModel.of(costs(toy, 2, 8), BATCH, None)
    alone = costs(toy, BATCH)[BATCH]
    assert fit.peak(BATCH, BATCH) <= max(alone.passes, alone.outside) < fit.passes(BATCH)


def test_one_point_is_completed_by_a_relative():
    toy = Toy.drawn(22)
    like = CostModel.of(costs(toy, 2, 8), BATCH, None)
    fit = CostModel.of(costs(toy, 8, checkpointing="selective"), BATCH, like)
    for micro, found in costs(toy, 4, 16, checkpointing="selective").items():
        assert fit.peak(micro, BATCH) == pytest.approx(max(found.passes, found.outside), rel=0.05)
        assert fit.step_seconds(micro, BATCH) == pytest.approx(found.seconds, rel=0.03)


def test_what_checkpointing_does_in_one_precision_it_does_in_another():
    toy = Toy.drawn(22)
    fits = {(kind, precision): CostModel.of(costs(toy, 2, 8, checkpointing=kind, precision=precision), BATCH, None)
            for kind in ("none", "every-block") for precision in ("bf16", "fp32")}
    effect = fits["none", "bf16"].effect(fits["every-block", "bf16"], 8, BATCH, 0.0)
    carried, truth = fits["none", "fp32"].changed(effect), fits["every-block", "fp32"]
    assert carried.peak(8, BATCH) == pytest.approx(truth.peak(8, BATCH), rel=0.15)
    assert carried.step_seconds(8, BATCH) == pytest.approx(truth.step_seconds(8, BATCH), rel=0.15)
    assert effect.then(fits["every-block", "bf16"].effect(fits["none", "bf16"], 8, BATCH, 0.0)).kept == (
        pytest.approx(1.0))


def test_a_line_never_falls_below_zero():
    assert Affine.through(2, 10.0, 4, 8.0) == Affine(base=10.0, slope=0.0)
    assert Affine.through(2, 1.0, 4, 9.0) == Affine(base=0.0, slope=4.0)


def test_a_value_is_forecast_by_what_needs_it():
    """memory-budget comes with a compiler alone, and tells all the same what the compiler gains."""
    toy = Toy.drawn(22)
    space = Space(Recipe.from_dict({"batch_size": BATCH}), DEVICE)
    plain = space.with_value(space.defaults, "compile", NoCompile())
    compiled = space.with_value(plain, "compile", PerBlock())
    tuned = space.with_value(compiled, "checkpointing", MemoryBudget())
    whole = costs(toy, 2, 8)
    fast = {micro: replace(found, estimate=replace(found.estimate, time=replace(
        found.estimate.time, step_seconds=found.seconds / 3))) for micro, found in whole.items()}
    by_rule = Forecasts(space, {plain: whole})
    known = Forecasts(space, {plain: whole, tuned: fast})
    assert known.of(compiled).optimistic.step_seconds(8, BATCH) == pytest.approx(whole[8].seconds / 3, rel=0.05)
    assert by_rule.of(compiled).optimistic.step_seconds(8, BATCH) > 1.5 * whole[8].seconds / 3


def test_bytes_that_nothing_declares_are_learned_from_a_pair():
    """Embeddings in host memory: how much of a model they are is told by the first trace that has them there."""
    toy = Toy.drawn(22)
    space = Space(Recipe.from_dict({"batch_size": BATCH}), DEVICE)
    here, there = (value for value in space.values["offload"] if value.shares.activations)
    blocks = space.with_value(space.with_value(space.defaults, "checkpointing", EveryBlock()), "offload", here)
    whole = costs(toy, 2, 8)
    held = {micro: replace(found, held=found.held + 1000) for micro, found in whole.items()}
    selective = space.with_value(space.with_value(space.defaults, "checkpointing", Selective()), "offload", here)
    known = Forecasts(space, {blocks: held, selective: held, space.with_value(selective, "offload", there): whole})

    before, after = known.of(blocks).expected, known.of(space.with_value(blocks, "offload", there)).expected
    assert before.passes.base - after.passes.base == pytest.approx(1000)

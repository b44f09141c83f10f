"""Plans of streamed steps, held against the same steps run for real, with every storage followed in both."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.backends.pytorch.techniques.by_block.streaming_cases import BY_BLOCK, FROZEN, HOST, SWEEPS, UPWARD
from tightfit.backends import load_backend
from tightfit.backends.pytorch.assembly import apply_techniques, bare_build
from tightfit.backends.pytorch.batch import TensorBatch, TensorGlobalBatch
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate import predict as prediction
from tightfit.backends.pytorch.simulate.fake_global_batches import micro_batch_sizes
from tightfit.backends.pytorch.simulate.predict import predict
from tightfit.backends.pytorch.step import Step
from tightfit.devices import find_device, with_memory
from tightfit.planning.costs import FitRank
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import estimate
from tightfit.planning.search.search import search, search_with
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.targets import Target
from tightfit.recipe import Recipe
from tightfit.system import whole_pages
from tightfit.trace import COPIES, Category, Phase, Place, Stream, Trace

A100 = find_device("a100-80gb-sxm")
BLOCKS, WORTHWHILE = 9, 5
"""Blocks of a model, and groups of them from which two traces, of 5 and 6 groups, stand for the whole."""
FIELDS: dict[str, Any] = {
    "model": "gpt2", "model_overrides": {"n_embd": 64, "n_head": 4, "vocab_size": 512, "tie_word_embeddings": False,
                                         "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "data": {"source": "dummy", "eval_fraction": 0}, "batch_size": 6, "micro_batch_size": 2, "seq_len": 64,
    "precision": "fp32", "attention": "eager", "compile": "off", "loss": "plain", "checkpointing": "every-block",
    "optimizer": {"name": "adamw", "implementation": "loop"}, "max_grad_norm": 1.0,
}
ALL = {**HOST, "offload": {"name": "host", "activations": 1}}
SHARES = {**HOST, "offload": {"name": "host", "weights": 8 / BLOCKS, "gradients": 8 / BLOCKS,
                               "optimizer": 7 / BLOCKS}}
EVERYTHING = {**HOST, "loss": "chunked", "offload": {"name": "host", "activations": 1, "embeddings": True}}

IN_BACKWARD = {"accumulation": {"name": "by-block", "gradient_sums": "fp32"}, "update": "in-backward",
               "precision": "bf16-pure", "optimizer": "adamw", "max_grad_norm": 0}

LORA = FROZEN["lora"]
ALL_OF_LORA = {**ALL, **LORA}
TOP = {"trainable": {"name": "layers", "names": ["lm_head", "h.2", "ln_f"]}}


def recipe_of(layers: int, **fields: Any) -> Recipe:
    overrides = {**FIELDS["model_overrides"], "n_layer": layers}
    return resolve(Recipe.from_dict({**FIELDS, "model_overrides": overrides, **fields}), A100)


@cache
def streamed_and_deep() -> Trace:
    """The plan's trace of a deep model whose blocks wait in host memory. Not to be changed."""
    return predict(recipe_of(14, **HOST), A100)


def taken(recipe: Recipe) -> Trace:
    """Three real steps on the processor, whose memory stands for both places."""
    build = apply_techniques(bare_build(recipe, A100, torch.device("cpu")))
    tracker = Tracker()
    tracker.follow(build.model)
    vocabulary = build.facts.vocab_size
    with tracker, build.process_settings():
        step = Step(build, inspect=False)
        for number, sizes in enumerate(([2], [2], [2, 2, 2])):
            batches = tuple(TensorBatch(inputs={"input_ids": torch.randint(0, vocabulary, (size, recipe.seq_len))},
                                        labels=torch.randint(0, vocabulary, (size, recipe.seq_len))) for size in sizes)
            samples = sum(sizes)
            with tracker.span(f"step {number + 1}", step=number + 1):
                step(TensorGlobalBatch(micro_batches=batches, count=samples * recipe.seq_len, samples=samples,
                                       tokens=samples * recipe.seq_len, origin="test"), 1e-3)
        return tracker.trace("measured")


@pytest.mark.parametrize("fields", [
    BY_BLOCK, HOST, SWEEPS, ALL, EVERYTHING, IN_BACKWARD, {**HOST, **LORA, "base": "as-is"},
    {**UPWARD, **LORA, "base": "nf4"}, {**EVERYTHING, **LORA, "base": "int8"}, {**UPWARD, **TOP},
], ids=["resident", "host", "sweeps", "all", "everything", "in-backward", "lora", "nf4", "int8", "layers"])
def test_memory_is_what_the_step_takes(fields):
    recipe = recipe_of(4, **fields)
    planned, real = predict(recipe, A100, whole=True), taken(recipe)

    for place in (Place.DEVICE, Place.HOST):
        tolerance = 0.005 if place is Place.DEVICE else 0
        last = [trace.spans[-1] for trace in (planned, real)]
        peaks = [trace.peak(span.start, span.stop, place)[1]
                 for trace, span in zip((planned, real), last, strict=True)]
        assert [span.step for span in last] == [2, 3]  # a plan's states are there before its first
        assert peaks[0] == pytest.approx(peaks[1], rel=tolerance)
        assert planned.peak(place=place)[1] == pytest.approx(real.peak(place=place)[1], rel=tolerance)
    assert bool(planned.lying_in(Place.HOST)) == ("offload" in fields)


def test_casts_of_weights_do_not_wait_in_host_memory():
    """Where nothing is recomputed, a block keeps autocast's casts for its backward pass, which casts again."""
    recipe = recipe_of(4, **ALL, precision="bf16", checkpointing="none")
    relu = {**recipe.model_overrides, "activation_function": "relu"}  # powers are cast on CUDA alone
    recipe = recipe.override(model_overrides=relu)
    planned, real = predict(recipe, A100, whole=True), taken(recipe)

    for trace in (planned, real):
        kept = {a.shape for a in trace.allocations if a.place is Place.HOST and a.category is Category.ACTIVATIONS}
        assert kept
        assert kept.isdisjoint({(64, 64), (64, 192), (64, 256), (256, 64)})
    assert planned.peak(place=Place.HOST)[1] == real.peak(place=Place.HOST)[1]
    assert planned.peak()[1] == pytest.approx(real.peak()[1], rel=0.005)


@pytest.mark.parametrize("fields", [
    HOST, EVERYTHING,
    *(pytest.param(fields, marks=pytest.mark.cold) for fields in (
        ALL_OF_LORA, BY_BLOCK, SWEEPS, {**SWEEPS, "batch_size": 16}, ALL, SHARES, {**UPWARD, **LORA, "base": "nf4"},
        {**SHARES, **LORA})),
], ids=["host", "everything", "all of lora", "resident", "sweeps", "many sweeps", "all", "shares", "nf4",
        "shares of lora"])
def test_few_blocks_tell_of_the_rest(fields, monkeypatch):
    monkeypatch.setattr(prediction, "FEWEST_GROUPS", WORTHWHILE)
    recipe, depths = recipe_of(BLOCKS, **fields), []
    whole, traced = predict(recipe, A100, whole=True), prediction._traced

    def counted(*args, **options):
        depths.append(len(args) > 4)
        return traced(*args, **options)

    monkeypatch.setattr(prediction, "_traced", counted)
    extended = predict(recipe, A100)

    assert depths == [True] * (3 if fields is ALL_OF_LORA else 2)  # whose first block keeps no input
    assert len(extended.ops) == len(whole.ops)
    for place in (Place.DEVICE, Place.HOST):
        assert extended.peak(place=place)[1] == whole.peak(place=place)[1]
    for stream in Stream:
        moved = [sum(op.bytes_read * times for op, times in trace.step_ops() if op.stream is stream)
                 for trace in (extended, whole)]
        assert moved[0] == moved[1]


def test_the_device_holds_two_blocks_and_the_host_all():
    plain, streamed = predict(recipe_of(14), A100), streamed_and_deep()
    tick, _ = streamed.peak(place=Place.HOST)
    block = streamed.by_category(tick, Place.HOST)[Category.WEIGHTS] // 14

    assert streamed.peak()[1] < plain.peak()[1]
    assert {category for category, count in streamed.by_category(tick, Place.HOST).items() if count} == {
        Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER}
    places = [a for a in streamed.alive(streamed.span("step 2").stop) if a.dtype == "uint8"]
    assert block == whole_pages(sum(a.bytes for a in places if a.category is Category.WEIGHTS) // 2)


def test_updates_are_timed_as_updates_where_blocks_wait_for_them():
    trace = streamed_and_deep()
    updated = {op.module for op, _ in trace.step_ops() if op.phase is Phase.OPTIMIZER}

    assert {f"transformer.h.{number}" for number in range(14)} <= updated


def planned_beyond(recipe, card):
    """The plan of what fits with nothing in host memory on no account."""
    backend = load_backend("pytorch")
    assert search(recipe.override(offload="none"), card, standard_tools(backend), comparing=True).chosen is None
    plan = search_with(backend, recipe, Target(device=card))
    assert plan.chosen is not None
    return plan


def test_what_fits_no_other_way_is_streamed_and_says_so():
    card = with_memory(A100, 1200 << 20)
    overrides = {**FIELDS["model_overrides"], "n_layer": 4, "n_embd": 1024}
    plan = planned_beyond(Recipe.from_dict({**FIELDS, "model_overrides": overrides}), card)

    assert plan.chosen.recipe.offload.name == "host"
    assert any("offload=none" in note for note in plan.notes)
    assert sum(plan.chosen.estimate.memory.host_by_category.values()) > 0


@pytest.mark.cold
def test_optimizer_states_leave_the_card_before_blocks_do():
    recipe = Recipe.from_dict({
        **FIELDS, "model": "gpt2-medium", "precision": "bf16", "attention": "sdpa", "loss": "chunked",
        "model_overrides": {"n_layer": 4, "n_embd": 1536, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
        "seq_len": 1024, "batch_size": 64, "micro_batch_size": 4, "optimizer": "adamw",
        "expandable_segments": False,
    })
    plan = planned_beyond(recipe, with_memory(A100, 4500 << 20))
    chosen = plan.chosen.recipe
    assert (chosen.offload.name, chosen.accumulation.name, chosen.update.name) == ("host", "loop", "with-forward")
    assert chosen.offload.weights == chosen.offload.gradients == 0
    assert not any("offload=none" in note for note in plan.notes)


def test_host_memory_that_does_not_suffice_is_said():
    recipe, tools = recipe_of(14, **HOST), standard_tools(load_backend("pytorch"))
    trace = streamed_and_deep()
    fitting, lacking = (estimate(trace, recipe, replace(A100, host_bytes=size), tools) for size in (1 << 30, 1 << 20))

    assert fitting.fit_rank is FitRank.SAFE
    assert lacking.fit_rank is FitRank.NONE
    assert lacking.memory.host_missing == fitting.memory.host - (1 << 20) + lacking.memory.host_margin


@pytest.mark.parametrize(("batch", "sweep"), [(6, 1), (8, 1), (14, 2), (15, 2), (17, 2)])
def test_alike_sweeps_are_traced_once(batch, sweep, monkeypatch):
    """What repeats stands for all: FLOPs and peaks are those of every sweep traced, and nearly so copies."""
    fields = {**HOST, "accumulation": {"name": "by-block", "sweep": sweep}, "batch_size": batch}
    recipe = recipe_of(3, **fields)
    once = predict(recipe, A100, whole=True)
    each = [(size, 1) for size in micro_batch_sizes(recipe)]
    monkeypatch.setattr(prediction, "micro_batch_groups", lambda recipe, ends_apart=False: each)
    every = predict(recipe, A100, whole=True)

    assert (len(once.ops) < len(every.ops)) == (len(each) > 3 * sweep)
    for place in (Place.DEVICE, Place.HOST):
        assert once.peak(place=place)[1] == every.peak(place=place)[1]
    flops = [sum(op.flops * times for op, times in trace.step_ops()) for trace in (once, every)]
    assert flops[0] == flops[1]
    for stream in COPIES:
        copied = [sum(times for op, times in trace.step_ops() if op.stream is stream) for trace in (once, every)]
        # The second sweep finds one block less in its place than those behind it.
        assert 0 <= copied[0] - copied[1] < len(each) / sweep - 2

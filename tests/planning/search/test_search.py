"""The search against brute force, on toy models whose cost is a closed form; what it answers, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.toy import Toy
from tightfit.devices import MIB, Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import Margin, Timed, estimate
from tightfit.planning.search import lines, probing
from tightfit.planning.search import search as searching
from tightfit.planning.search.candidates import Config, Scope, configs, departures_of, micro_batch_sizes
from tightfit.planning.search.exploring import GAIN
from tightfit.planning.search.found import Found
from tightfit.planning.search.search import TRACES, search
from tightfit.recipe import Recipe

MARGIN = Margin(share=0.03, fixed=0)
LONG = 10**7
"""Steps of a run so long that compiling pays."""


def gpu(memory, capability=(8, 0), name="toy"):
    return Device(kind="cuda", name=name, memory_bytes=int(memory), capability=capability)


def weigh(toy, recipe, device, scope):
    """Every combination of a scope at every micro-batch, each traced itself."""
    for config in configs(recipe, device, scope):
        for micro in micro_batch_sizes(recipe):
            resolved = config.on(recipe, micro)
            cost = estimate(toy.predict(resolved, device), resolved, device, toy.tools(), MARGIN)
            yield Found(config, micro, cost)


def brute_force(toy, recipe, device):
    """The best by the documented rule, with no shortcut; None where nothing fits."""
    ways = [(Scope(), False), *([(Scope(numerics=True), False)] if recipe.allow_numerics else []),
            (Scope(full_precision=True), True), (Scope(numerics=True), True),
            (Scope(full_precision=True, numerics=True), True),
            (Scope(full_precision=True, numerics=True, learning_rate=True), True)]
    found = []
    for tier in (0, 2):
        for scope, last_resort in ways:
            if not (last_resort and any(f.tier <= tier for f in found)):
                found += weigh(toy, recipe, device, scope)
        fitting = [f for f in found if f.tier <= tier]
        if fitting:
            return max(fitting, key=lambda f: (score(recipe, device, f), f.micro))
    return None


def score(recipe, device, found):
    """Speed, docked by 2 % for each departure from the plainest."""
    return found.speed * 0.98 ** sum(departures_of(recipe, device, found.config))


def memory_for(toy, seed):
    """A device that the toy's weights, gradients and states fill to a degree drawn by lot, and its activations too."""
    weights, sample = toy.blocks * toy.weights, toy.blocks * sum(toy.saved.values())
    states, samples = (0.45, 0.7, 1.0, 1.0, 1.0, 1.0)[seed % 6], (1, 2, 4, 6, 9, 14)[seed // 6 % 6]
    return 17 * weights * states + samples * sample * 0.6 + 5 * MIB


def chosen(plan):
    recipe = plan.recipe
    config = Config(recipe.attention, recipe.precision, recipe.checkpointing, recipe.compile, recipe.optimizer)
    return Found(config, recipe.micro_batch_size, plan.chosen.estimate)


def of(toy, memory, margin=MARGIN, limit=TRACES, device=None, **fields):
    """The toy's plan on a device of so many bytes."""
    aligned = {"vocab_size": 50_304}  # or the gain from padding it would be asked for
    recipe = Recipe.from_dict({"batch_size": 16, "max_steps": LONG, "loading": {"workers": 2}, **aligned, **fields})
    return search(recipe, device or gpu(memory), toy.tools(), margin=margin, limit=limit)


@pytest.mark.parametrize(("allow_numerics", "batch", "seeds"), [
    (False, 8, (10, 12, 15, 20, 21, 27, 28, 33)), (False, 7, (40, 43, 44)), (True, 4, (100, 102)),
])
def test_finds_what_brute_force_finds(allow_numerics, batch, seeds):
    """Within the gain for which nothing more is traced; and never with more traces than it may make."""
    kinds = set()
    for seed in seeds:
        toy = Toy.drawn(seed)
        device = gpu(memory_for(toy, seed))
        recipe = Recipe(batch_size=batch, max_steps=LONG, allow_numerics=allow_numerics, loading={"workers": 2})
        best = brute_force(toy, recipe, device)
        toy.calls.clear()
        plan = search(recipe, device, toy.tools(), margin=MARGIN)
        assert len(toy.calls) == plan.predictions <= TRACES
        if best is None:
            assert plan.chosen is None, seed
            kinds.add("nothing")
            continue
        found = chosen(plan)
        truth = estimate(toy.predict(plan.recipe, device), plan.recipe, device, toy.tools(), MARGIN)
        assert plan.chosen.verified
        assert plan.chosen.estimate == truth
        assert found.tier == best.tier, seed
        assert score(recipe, device, found) >= (1 - GAIN) * score(recipe, device, best), seed
        kinds.add((found.config.checkpointing.name, found.config.precision.name))
    assert len(kinds) > 1 or len(seeds) < 8, kinds


@pytest.mark.parametrize("seed", [100, 102, 103])
def test_an_optimizers_step_put_into_plain_passes_changes_no_choice(seed, monkeypatch):
    toy = Toy.drawn(seed)
    memory = memory_for(toy, seed)
    usual = of(toy, memory, allow_numerics=True)
    assert not any(recipe.optimizer.name == "sgd" for recipe in toy.calls)
    toy.calls.clear()
    monkeypatch.setattr(probing, "MANY_OPS", -1)
    spliced = of(toy, memory, allow_numerics=True)
    assert any(recipe.optimizer.name == "sgd" for recipe in toy.calls)
    assert spliced.recipe == usual.recipe
    assert not any(candidate.recipe.optimizer.name == "sgd" for candidate in spliced.candidates)
    assert spliced.chosen.estimate == usual.chosen.estimate


def test_large_traces_end_a_search_and_it_says_so(monkeypatch):
    toy = Toy.drawn(21)
    usual = of(toy, memory_for(toy, 21))
    monkeypatch.setattr(searching, "EVENTS", 1)
    few = of(toy, memory_for(toy, 21))
    assert few.predictions < usual.predictions
    assert any("what they may hold" in note for note in few.notes)
    assert few.chosen.verified


def test_what_is_thriftiest_is_tried_before_nothing_is_said_to_fit(monkeypatch):
    """Even where the limit on what traces may hold ends the exploration before it."""
    toy = replace(Toy.drawn(12), weights=10_000_000)
    monkeypatch.setattr(searching, "EVENTS", 1)
    plan = of(toy, 9 * toy.blocks * toy.weights)
    assert plan.chosen is not None
    assert plan.chosen.verified
    assert plan.chosen.changes_numerics
    left = [note for note in plan.notes if "were not traced" in note]
    assert len(left) == 1
    assert "were not traced: " in left[0]


def test_keeps_to_a_smaller_number_of_traces_and_says_what_was_left_out():
    toy = Toy.drawn(21)
    plan = of(toy, memory_for(toy, 21), limit=9)
    assert len(toy.calls) == plan.predictions <= 9
    assert any("not traced" in note for note in plan.notes)
    assert plan.recipe


def test_pins_are_kept():
    toy = Toy.drawn(12)
    pins = {"precision": "fp32", "checkpointing": "mlp", "micro_batch_size": 4, "optimizer": "lion"}
    plan = of(toy, 1 << 34, **pins)
    asked = Recipe.from_dict(pins)
    for field in pins:
        assert getattr(plan.recipe, field) == getattr(asked, field)
    assert plan.chosen.changes_numerics == ()


def test_a_settled_recipe_takes_one_trace():
    toy = Toy.drawn(12)
    plan = of(toy, 1 << 34, precision="bf16", checkpointing="none", micro_batch_size=4, optimizer="adamw",
              attention="sdpa", compile="off")
    assert plan.predictions == 1
    assert [c.recipe for c in plan.candidates] == toy.calls


def test_nothing_is_left_auto():
    toy = Toy.drawn(12)
    recipe = search(Recipe(batch_size=4), gpu(1 << 34), toy.tools()).recipe
    assert "auto" not in [recipe.micro_batch_size, recipe.loading.workers, recipe.precision, recipe.checkpointing,
                          recipe.optimizer, recipe.attention, recipe.compile]


def test_numerics_change_only_where_nothing_else_fits():
    toy = replace(Toy.drawn(12), weights=10_000_000)
    roomy = of(toy, 40 * toy.blocks * toy.weights)
    assert roomy.chosen.changes_numerics == ()
    tight = of(toy, 12 * toy.blocks * toy.weights)
    assert tight.chosen.changes_numerics
    assert any("numerics: picked because nothing that keeps them fits" in r for r in tight.chosen.reasons)
    for name in tight.chosen.changes_numerics:
        assert any(name in reason for reason in tight.chosen.reasons)


def test_allowed_numerics_are_told_too():
    toy = replace(Toy.drawn(12), saved={"attention": 100_000, "mlp": 100_000, "norm": 100_000}, weights=10_000_000)
    plan = of(toy, 15 * toy.blocks * toy.weights, allow_numerics=True)
    assert plan.chosen.changes_numerics
    assert any("picked because allow_numerics lets it" in reason for reason in plan.chosen.reasons)


def test_what_leaves_no_margin_is_a_last_resort():
    toy = Toy.drawn(12)
    pins = {"precision": "bf16", "checkpointing": "none", "micro_batch_size": 4, "optimizer": "adamw",
            "attention": "sdpa", "compile": "off"}
    cost = of(toy, 1 << 34, **pins).chosen.estimate.memory
    needed = cost.used
    plan = of(toy, needed, **pins)
    assert plan.chosen.estimate.fits == "yes"
    assert not plan.chosen.estimate.safe
    assert any("less than the margin" in reason for reason in plan.chosen.reasons)
    plan = of(toy, needed - 1, **pins)
    assert plan.chosen is None
    assert plan.candidates[0].estimate.missing == 1
    plan = of(toy, needed / 0.97 + 2, **pins)
    assert plan.chosen.estimate.safe


def test_a_short_run_is_not_compiled():
    toy = replace(Toy.drawn(13), fused=0.3, bandwidth=1e9)
    assert of(toy, 1 << 34, max_steps=LONG).recipe.compile.name == "per-block"
    short = of(toy, 1 << 34, max_steps=10)
    assert short.recipe.compile.name == "off"
    told = short.to_json()["candidates"][0]["reasons"]
    assert any(reason.startswith("compile: not weighed, for the whole run takes") for reason in told)
    assert not any(note.startswith("compile:") for note in of(toy, 1 << 34, max_steps=10, compile="off").notes)


@pytest.mark.parametrize(("slower", "expected"), [(0.0005, 4), (0.01, 32)])
def test_of_what_is_as_fast_the_one_that_takes_least_memory_is_chosen(slower, expected):
    toy = Toy.drawn(22)

    def seconds(trace, recipe, device):
        return Timed(seconds=1 + slower * {32: 0, 16: 1, 8: 2, 4: 3, 2: 40, 1: 80}[recipe.micro_batch_size])

    recipe = Recipe(batch_size=32, compile="off", checkpointing="none", precision="bf16", loading={"workers": 2})
    plan = search(recipe, gpu(1 << 40), replace(toy.tools(), step_time=seconds), margin=MARGIN)
    assert plan.recipe.micro_batch_size == expected
    assert ("takes less memory" in plan.answers.why) == (expected < 32)


def test_falls_back_to_a_kernel_that_the_model_has():
    toy = Toy.drawn(13)

    def no_sdpa(recipe, device):
        if recipe.attention.name != "eager":
            raise ModelError("model: this one has no sdpa")
        return toy.predict(recipe, device)

    device = Device(kind="cpu", name="CPU", memory_bytes=1 << 34)
    plan = search(Recipe(batch_size=4, compile="off"), device, replace(toy.tools(), predict=no_sdpa))
    assert plan.recipe.attention.name == "eager"


@pytest.mark.parametrize(("fused", "asked"), [(False, "auto"), (True, "auto"), (False, "sdpa")])
def test_eager_attention_is_weighed_where_sdpa_has_no_fused_kernel(fused, asked):
    toy, tried = Toy.drawn(13), set()

    def predict(recipe, device):
        trace = toy.predict(recipe, device)
        tried.add(recipe.attention.name)
        return replace(trace, ops=[replace(op, name=op.name if fused else "aten._safe_softmax") for op in trace.ops])

    def seconds(trace, recipe, device):
        slower = 1.2 if recipe.attention.name == "sdpa" else 1.0
        return Timed(seconds=slower * toy.seconds(trace, recipe, device).seconds)

    device = Device(kind="cpu", name="CPU", memory_bytes=1 << 34)
    recipe = Recipe(batch_size=4, compile="off", attention=asked, loading={"workers": 2})
    plan = search(recipe, device, replace(toy.tools(), predict=predict, step_time=seconds), margin=MARGIN)
    wanted = "eager" if asked == "auto" and not fused else "sdpa"
    assert (plan.recipe.attention.name, "eager" in tried) == (wanted, wanted == "eager")


def test_leaves_out_what_cannot_be_built():
    toy = Toy.drawn(13)

    def no_compile(recipe, device):
        if recipe.compile.name != "off":
            raise Refused("compile: not for this model")
        return toy.predict(recipe, device)

    plan = search(Recipe(batch_size=8, max_steps=LONG), gpu(1 << 34), replace(toy.tools(), predict=no_compile))
    assert plan.recipe.compile.name == "off"
    assert plan.notes == ("left out: compile: not for this model",)


def test_finds_its_way_where_traces_cannot_be_interpolated():
    """Where the number of events depends on the micro-batch, few traces more are made, and the choice is as good."""
    toy = Toy.drawn(22)

    def jagged(recipe, device):
        trace = toy.predict(recipe, device)
        return replace(trace, ops=[*trace.ops[:3 * recipe.micro_batch_size], *trace.ops])

    device, recipe = gpu(memory_for(toy, 22)), Recipe(batch_size=16, compile="off", loading={"workers": 2})
    tools = replace(toy.tools(), predict=jagged)
    plan = search(recipe, device, tools, margin=MARGIN)
    smooth = search(recipe, device, toy.tools(), margin=MARGIN)
    assert plan.predictions <= TRACES
    assert plan.chosen.estimate.time.samples_per_second >= 0.98 * smooth.chosen.estimate.time.samples_per_second


@pytest.mark.parametrize(("less", "events"), [(0.92, searching.EVENTS), (0.92, 1), (1.0, searching.EVENTS)])
def test_a_compiled_step_that_may_need_less_at_a_small_micro_batch_is_traced_there(less, events, monkeypatch):
    """Also where what traces may hold was spent while it was explored."""
    monkeypatch.setattr(searching, "EVENTS", events)
    toy = Toy.drawn(22)

    def partitioned(recipe, device):
        trace = toy.predict(recipe, device)
        small = recipe.compile.name != "off" and recipe.micro_batch_size < probing.UNROLLED
        return replace(trace, allocations=[replace(a, bytes=round(a.bytes * (less if small else 1)))
                                           for a in trace.allocations])

    recipe = Recipe(batch_size=16, max_steps=LONG, compile="per-block", checkpointing="none", precision="bf16",
                    loading={"workers": 2})
    needed = toy.predict(resolve(recipe.model_copy(update={"micro_batch_size": 4}), gpu(1 << 34)), gpu(1 << 34))
    memory = 0.99 * (needed.peak()[1] + 2 * MIB) * 31 / 30 + toy.context
    plan = search(recipe, gpu(memory), replace(toy.tools(), predict=partitioned), margin=MARGIN)
    assert plan.recipe.micro_batch_size == (4 if less < 1 else 2)
    assert plan.chosen.verified


def test_the_smallest_gpu_is_traced_without_a_compiler_where_it_fits_so():
    toy, called = Toy.drawn(22), []

    def predict(recipe, device):
        called.append((device.name, recipe.compile.name))
        return toy.predict(recipe, device)

    recipe = Recipe(batch_size=16, max_steps=LONG, precision="bf16", loading={"workers": 2}, vocab_size=50_304)
    tools = replace(toy.tools(), predict=predict)
    plan = search(recipe, gpu(1 << 34), tools, margin=MARGIN, catalogue=[gpu(1 << 33, name="half")])
    assert plan.answers.smallest_gpu.name == "half"
    assert plan.recipe.compile.name == "per-block"
    assert [kind for name, kind in called if name == "half"] == ["off"]


def test_micro_batches_of_ever_longer_traces_are_left_alone(monkeypatch):
    """As packed documents on a processor make them: a billion samples are planned as fast as a few."""
    monkeypatch.setattr(lines, "LONGER", 50)
    toy = Toy.drawn(22)

    def growing(recipe, device):
        trace = toy.predict(recipe, device)
        assert recipe.micro_batch_size <= 16
        return replace(trace, ops=[*trace.ops[:1] * 8 * recipe.micro_batch_size, *trace.ops])

    recipe = Recipe(batch_size=10**5, compile="off", loading={"workers": 2})
    plan = search(recipe, gpu(1 << 40), replace(toy.tools(), predict=growing), margin=MARGIN)
    assert max(candidate.recipe.micro_batch_size for candidate in plan.candidates) == 16
    assert any(note.startswith("micro-batches above 16 were not looked at") for note in plan.notes)


def test_a_model_that_cannot_be_traced_is_told_with_what_is_known():
    def broken(recipe, device):
        raise ModelError("model: h.3.attn: aten.nonzero has no shape without values")

    with pytest.raises(ModelError) as caught:
        search(Recipe(model="gpt2"), gpu(1 << 34), replace(Toy.drawn(1).tools(), predict=broken))
    text = str(caught.value)
    assert "h.3.attn: aten.nonzero" in text
    assert "124,439,808 parameters" in text
    assert "475 MiB of weights" in text  # 124,439,808 x 4 bytes
    assert "949 MiB of optimizer states" in text


def test_contradictory_pins_are_refused_before_anything_is_traced():
    toy = Toy.drawn(1)
    with pytest.raises(Refused, match="memory-budget and compile=off cannot stand together"):
        of(toy, 1 << 34, checkpointing="memory-budget", compile="off")
    assert toy.calls == []


def test_progress_is_told():
    toy, told = Toy.drawn(12), []
    search(Recipe(batch_size=4), gpu(1 << 34), toy.tools(), progress=lambda *state: told.append(state))
    assert [done for done, _, _ in told] == list(range(len(toy.calls) + 1))
    assert {total for _, total, text in told if text != "done"} == {TRACES}
    assert "micro-batch 2" in told[0][2]


def test_plans_for_the_processor():
    toy = Toy.drawn(12)
    plan = of(toy, 0, device=Device(kind="cpu", name="CPU", memory_bytes=1 << 34))
    memory = plan.chosen.estimate.memory
    assert memory.peak_reserved == memory.peak_allocated
    assert plan.recipe.precision.name in ("fp32", "bf16")
    assert plan.answers.smallest_gpu is None

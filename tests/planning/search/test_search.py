"""The search against brute force, on toy models whose cost is a closed form; what it answers, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.failing import failing
from tests.planning.ops import gpu
from tests.planning.search.declared import GIB, Declared
from tests.planning.toy import Toy
from tightfit.devices import MIB, Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.costs import FitRank
from tightfit.planning.estimate import Margin, estimate
from tightfit.planning.plan import Interrupted
from tightfit.planning.search.budget import TraceBudget, TraceBudgetExceeded
from tightfit.planning.search.choose import choose
from tightfit.planning.search.evaluate import InProcess
from tightfit.planning.search.explain import ranked, too_large, why
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration
from tightfit.planning.search.explore import explore
from tightfit.planning.search.search import MOST_TRACES, search
from tightfit.planning.search.space import Space
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.timing.step_time import StepTime
from tightfit.planning.timing.uncertainty import Work
from tightfit.recipe import Recipe

MARGIN = Margin(share=0.03, fixed=0)
FEWER = {"expandable_segments": False, "attention": "sdpa", "loss": "plain", "offload": "none"}
"""Fields that the toy's costs do not depend on, or not in a way of their own."""
RECIPE_OF_8 = Recipe(batch_size=8, compile="off")


def brute_force(toy, recipe, device):
    """The choice by the documented rule among every combination at every micro-batch, each traced itself, as speed,
    fit and what changes numerics; None where nothing fits."""
    space = Space(recipe, device)
    whole = Exploration(space, InProcess(toy.tools(MARGIN)), TraceBudget(limit=10**9), margin=MARGIN)
    whole.evaluate([(choice, micro) for choice in space.combinations for micro in space.sizes])
    best = choose(whole)
    kept = {pair: found for pair, found in whole.found.items() if space.level(pair[0]) == (0, 0)}
    if not recipe.allow_numerics and any(found.fit_rank.is_safe for found in kept.values()):
        whole.found = kept
        best = choose(whole)
    if best is None:
        return None
    found = whole.found[best]
    return found.estimate.time.samples_per_second, found.fit_rank.is_safe, space.numerics(found.recipe)


def memory_for(toy, seed):
    """A device that the toy's weights, gradients and states fill to a degree drawn by lot, and its activations too."""
    weights, sample = toy.blocks * toy.weights, toy.blocks * sum(toy.saved.values())
    states, samples = (0.45, 0.7, 1.0, 1.0, 1.0, 1.0)[seed % 6], (1, 2, 4, 6, 9, 14)[seed // 6 % 6]
    return 17 * weights * states + samples * sample * 0.6 + 5 * MIB


def of(toy, memory, device=None, **fields):
    """The toy's plan on a device of so many bytes."""
    aligned = {"vocab_size": 50_304}  # or the gain from padding it would be asked for
    recipe = Recipe.from_dict({"batch_size": 16, "loading": {"workers": 2}, **FEWER, **aligned, **fields})
    return search(recipe, device or gpu(memory), toy.tools(MARGIN))


@pytest.mark.parametrize("for_run", [False, True])
def test_ctrl_c_leaves_the_best_so_far_but_of_a_run_that_begins(for_run):
    toy = Toy.drawn(3)

    def told(done, count, text):
        if "so far" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        search(RECIPE_OF_8, gpu(1 << 40), toy.tools(), progress=told, for_run=for_run)
    assert isinstance(caught.value, Interrupted) is not for_run
    if not for_run:
        plan = caught.value.found
        assert plan.chosen.estimate.fit_rank.fits
        assert plan.predictions < search(RECIPE_OF_8, gpu(1 << 40), toy.tools()).predictions
        assert "The fastest of those tried by then." in plan.reasons
        assert f"best of {plan.predictions} traces" in caught.value.said


@pytest.mark.parametrize(("allow_numerics", "batch", "seeds"), [(False, 8, (12, 15, 27, 39)), (True, 4, (13,))])
def test_finds_what_brute_force_finds(allow_numerics, batch, seeds):
    """Within the clock's error; with few traces, and each of its own."""
    for seed in seeds:
        toy = Toy.drawn(seed)
        device = gpu(memory_for(toy, seed))
        recipe = Recipe(batch_size=batch, compile="off", allow_numerics=allow_numerics, loading={"workers": 2}, **FEWER)
        speed, safe, numerics = brute_force(toy, recipe, device)
        toy.calls.clear()
        plan = search(recipe, device, toy.tools(MARGIN))
        assert len(toy.calls) == plan.predictions <= MOST_TRACES
        truth = estimate(toy.predict(plan.recipe, device), plan.recipe, plan.device, toy.tools(MARGIN))
        assert plan.chosen.estimate == truth
        assert (truth.fit_rank.is_safe, plan.chosen.changes_numerics) == (safe, numerics), seed
        assert truth.time.samples_per_second >= speed / (1 + CLOCK_ERROR), seed


def test_a_run_of_known_length_pays_for_compiling():
    toy = replace(Toy.drawn(13), fused=0.3, bandwidth=1e9)
    pins = {"precision": "bf16", "checkpointing": "none"}
    long, short = (of(toy, 1 << 34, max_steps=steps, **pins) for steps in (10**7, 10))
    assert (long.recipe.compile.name, short.recipe.compile.name) == ("per-block", "off")
    said = "Compared over 10 steps, with the 60 s or so that compiling takes."
    assert said in short.answers.why
    assert "Compared" not in long.answers.why
    default = of(toy, 1 << 34, **pins)  # whose length nobody asked for
    assert default.recipe.compile.name == "per-block"
    recipe = Recipe.from_dict({"batch_size": 16, "loading": {"workers": 2}, **FEWER, **pins})
    run = search(recipe, gpu(1 << 34), toy.tools(MARGIN), for_run=True)
    assert run.recipe.compile.name == "off"
    assert (long.whole_run.startup_seconds, short.whole_run.startup_seconds) == (60, 0)


class Uncast(Declared):
    """A compiled step keeps hardly any of autocast's copies, and the larger a micro-batch, the faster a step is."""

    def seconds(self, trace, recipe, device):
        step = super().seconds(trace, recipe, device)
        return replace(step, seconds=step.seconds * (1 + 1 / recipe.micro_batch_size))


@pytest.mark.parametrize("comparing", [False, True])
def test_the_usual_precision_that_fits_only_compiled_is_weighed_at_each_micro_batch(comparing):
    toy = Uncast(parameters=1e9, sample=GIB, speeds={("bf16", "adamw"): 2e4, ("fp32", "adamw"): 1e4}, copied=0.2)
    recipe = Recipe.from_dict({"batch_size": 16, "vocab_size": 50_304, "offload": "none"})
    plan = search(recipe, gpu(16.2e9 + 1.2 * GIB), toy.tools(MARGIN), comparing=comparing)
    chosen = plan.recipe
    assert (chosen.precision.name, chosen.compile.compiles, chosen.micro_batch_size) == ("bf16", True, 16)


def test_a_value_that_nothing_can_stand_in_for_is_not_dominated():
    """Classifiers have no chunked loss, which is declared to beat whole logits."""
    toy = replace(Toy.drawn(13), fused=0.3, bandwidth=1e9)
    classifier = {"model": "bert-base", "task": "sequence-classification", "seq_len": 128}
    plan = of(toy, 1 << 34, **classifier, loss="auto", precision="bf16", checkpointing="none")
    assert (plan.recipe.loss.name, plan.recipe.compile.name) == ("plain", "per-block")


@pytest.mark.parametrize(("shared", "chosen"), [(0.01, 4), (0.5, 2)])
def test_of_what_none_can_tell_apart_the_one_with_less_memory_is_taken(shared, chosen):
    """Two micro-batches of 2 are a little slower than one of 4 in all, by two kinds of work that go opposite ways."""
    toy = replace(Toy.drawn(13), fused=1.0)

    def seconds(trace, recipe, device):
        fewer = recipe.micro_batch_size == 4
        work = {Work.MEMORY: 1.0 + shared * fewer, Work.TENSOR_CORES: 2.0 - (shared + 0.02) * fewer}
        return StepTime(seconds=sum(work.values()), work=work)

    pins = {"compile": "off", "checkpointing": "none", "precision": "bf16", **FEWER}
    recipe = Recipe.from_dict({"batch_size": 64, "vocab_size": 50_304, **pins})
    exploration = Exploration(Space(recipe, gpu(1 << 34)), InProcess(replace(toy.tools(MARGIN), step_time=seconds)),
                              TraceBudget(limit=99), margin=MARGIN)
    choice = exploration.space.defaults
    exploration.evaluate([(choice, 2), (choice, 4)])
    assert choose(exploration) == (choice, chosen)


def test_eager_attention_is_weighed_on_processors_alone():
    toy, tried = Toy.drawn(13), set()

    def predict(recipe, device):
        tried.add((device.kind, recipe.attention.name))
        return toy.predict(recipe, device)

    def seconds(trace, recipe, device):
        slower = 1.2 if recipe.attention.name == "sdpa" else 1.0
        return StepTime(seconds=slower * toy.seconds(trace, recipe, device).seconds)

    recipe = Recipe(batch_size=4, compile="off", checkpointing="none", precision="bf16", loading={"workers": 2})
    tools = replace(toy.tools(MARGIN), predict=predict, step_time=seconds)
    for device in (Device(kind="cpu", name="CPU", memory_bytes=1 << 34), gpu(1 << 34)):
        plan = search(recipe, device, tools)
        assert plan.recipe.attention.name == ("eager" if device.kind == "cpu" else "sdpa")
    assert ("cuda", "eager") not in tried


def test_micro_batches_of_ever_longer_traces_are_left_alone(monkeypatch):
    """As packed documents on a processor make them: a billion samples are planned as fast as a few."""
    monkeypatch.setattr("tightfit.planning.search.explore.LONG_TRACE", 50)
    toy = Toy.drawn(22)

    def growing(recipe, device):
        trace = toy.predict(recipe, device)
        assert recipe.micro_batch_size <= 16
        return replace(trace, ops=[*trace.ops[:1] * 8 * recipe.micro_batch_size, *trace.ops])

    recipe = Recipe(batch_size=10**5, compile="off", loading={"workers": 2}, precision="bf16", **FEWER)
    plan = search(recipe, gpu(1 << 40), replace(toy.tools(MARGIN), predict=growing))
    assert any(note.startswith("micro-batches above 16 were not looked at") for note in plan.notes)


@pytest.mark.parametrize("field", ["micro_batch_size", "checkpointing", "compile"])
def test_no_choice_is_worse_than_one_of_its_own_pinnings(field):
    toy = Toy.drawn(15)
    memory, pins = memory_for(toy, 15), {"precision": "bf16", "optimizer": "adamw"}
    free = of(toy, memory, **pins)
    pinned = of(toy, memory, **pins, **{field: free.recipe.to_dict()[field]})
    speeds = [plan.chosen.estimate.time.samples_per_second for plan in (free, pinned)]
    assert speeds[1] <= (1 + CLOCK_ERROR) * speeds[0]


def test_keeps_to_a_smaller_number_of_traces_and_says_what_was_left_out(monkeypatch):
    monkeypatch.setattr("tightfit.planning.search.budget.ANSWER_TRACES", 0)
    monkeypatch.setattr("tightfit.planning.search.search.MOST_TRACES", 12)
    toy = Toy.drawn(15)
    recipe = Recipe.from_dict({"batch_size": 16, **FEWER})
    plan = search(recipe, gpu(memory_for(toy, 15)), toy.tools(MARGIN))
    assert len(toy.calls) == plan.predictions <= 12
    assert any("not traced" in note for note in plan.notes)
    assert plan.recipe


def test_explaining_traces_nothing():
    toy = Toy.drawn(16)
    recipe = Recipe(batch_size=16, loading={"workers": 2})
    found = Exploration(Space(recipe, gpu(memory_for(toy, 15))), InProcess(toy.tools(MARGIN)), TraceBudget(limit=40),
                        margin=MARGIN)
    explore(found)
    made = len(toy.calls)
    assert found.budget.made == made
    best = choose(found)
    assert why(found, best)
    assert {cost.fit_rank for cost in too_large(found)} == {FitRank.NONE}
    assert ranked(found)[0] is found.found[best]
    assert len(toy.calls) == made


def test_a_spent_budget_is_extended_for_answers():
    recipe = search(Recipe(batch_size=4), gpu(1 << 34), Toy.drawn(12).tools()).recipe
    budget = TraceBudget(limit=1)
    budget.check()
    budget.take(recipe)
    with pytest.raises(TraceBudgetExceeded):
        budget.check()
    budget.extend()
    budget.check()


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
    assert plan.candidates[0].recipe == toy.calls[0]
    assert plan.predictions <= 4  # what opening its fields would gain


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
    assert any("numerics: picked because nothing fits" in r for r in tight.reasons)
    for name in tight.chosen.changes_numerics:
        assert any(name in reason for reason in tight.reasons)


def test_allowed_numerics_are_told_too():
    toy = replace(Toy.drawn(12), saved={"attention": 100_000, "mlp": 100_000, "norm": 100_000}, weights=10_000_000)
    plan = of(toy, 15 * toy.blocks * toy.weights, allow_numerics=True)
    assert plan.chosen.changes_numerics
    assert any("picked because allow_numerics allows it" in reason for reason in plan.reasons)


def test_what_leaves_no_margin_is_a_last_resort():
    toy = Toy.drawn(12)
    pins = {"precision": "bf16", "checkpointing": "none", "micro_batch_size": 4, "optimizer": "adamw",
            "attention": "sdpa", "compile": "off"}
    cost = of(toy, 1 << 34, **pins).chosen.estimate.memory
    needed = cost.used
    plan = of(toy, needed, **pins)
    assert plan.chosen.estimate.fit_rank is FitRank.TIGHT
    assert any("less than the safety margin" in reason for reason in plan.reasons)
    plan = of(toy, needed - 1, **pins)
    assert plan.chosen is None
    assert plan.candidates[0].estimate.missing == 1
    plan = of(toy, needed / 0.97 + 2, **pins)
    assert plan.chosen.estimate.fit_rank.is_safe


def test_falls_back_to_a_kernel_that_the_model_has():
    toy = Toy.drawn(13)

    def no_sdpa(recipe, device):
        if recipe.attention.name != "eager":
            raise ModelError("model: this one has no sdpa")
        return toy.predict(recipe, device)

    device = Device(kind="cpu", name="CPU", memory_bytes=1 << 34)
    plan = search(Recipe(batch_size=4, compile="off"), device, replace(toy.tools(), predict=no_sdpa))
    assert plan.recipe.attention.name == "eager"


def test_leaves_out_what_cannot_be_built():
    toy = Toy.drawn(13)

    def no_compile(recipe, device):
        if recipe.compile.name != "off":
            raise Refused("compile: not for this model")
        return toy.predict(recipe, device)

    plan = search(Recipe(batch_size=8, max_steps=10**7), gpu(1 << 34), replace(toy.tools(), predict=no_compile))
    assert plan.recipe.compile.name == "off"
    assert plan.notes == ("left out: compile: not for this model",)


def test_a_model_that_cannot_be_traced_is_told_with_what_is_known():
    broken = failing(ModelError("model: h.3.attn: aten.nonzero has no shape without values"))
    with pytest.raises(ModelError) as caught:
        search(Recipe(model="gpt2"), gpu(1 << 34), replace(standard_tools(Toy.drawn(1)), predict=broken))
    text = str(caught.value)
    assert "h.3.attn: aten.nonzero" in text
    assert "124,439,808 parameters" in text
    assert "about 2.1 GiB of weights, gradients and optimizer states" in text  # 18 bytes each, with autocast's copies


def test_contradictory_pins_are_refused_before_anything_is_traced():
    toy = Toy.drawn(1)
    with pytest.raises(Refused, match=r"^checkpointing: .*write compile=per-block"):
        of(toy, 1 << 34, checkpointing="memory-budget", compile="off")
    assert toy.calls == []


def test_progress_is_told():
    toy, told = Toy.drawn(12), []
    search(Recipe(batch_size=4), gpu(1 << 34), toy.tools(), progress=lambda *state: told.append(state))
    assert [done for done, _, _ in told] == list(range(len(toy.calls) + 1))
    assert {total for _, total, text in told if text != "done"} == {None}
    assert told[0][2].startswith("now micro_batch_size=1")
    assert re.fullmatch(r"[\d,]+ tokens/s in [\d.]+ [KMG]iB so far, now .*", told[-2][2])


def test_plans_for_the_processor():
    toy = Toy.drawn(12)
    plan = of(toy, 0, device=Device(kind="cpu", name="CPU", memory_bytes=1 << 34))
    memory = plan.chosen.estimate.memory
    assert memory.peak_reserved == memory.peak_allocated
    assert plan.recipe.precision.name in ("fp32", "bf16")
    assert plan.answers.smallest_gpu is None


def test_the_lowest_memory_settings_are_found_whatever_others_that_were_traced_take():
    pins = {"batch_size": 16, "loading": {"workers": 2}, **FEWER, "vocab_size": 50_304, "optimizer": "adamw"}
    recipe, device = Recipe.from_dict(pins), gpu(1 << 34)
    least = Space(recipe, device).least_memory_recipe()

    class Misleading(Toy):
        def predict(self, recipe, device):
            trace = super().predict(recipe, device)
            slots = ("checkpointing", "compile", "precision")
            if any(getattr(recipe, slot) != getattr(least, slot) for slot in slots) or recipe.micro_batch_size > 1:
                trace.allocations.append(replace(trace.allocations[-1], bytes=1 << 40))
            return trace

    drawn = Toy.drawn(12)
    toy = Misleading(**{name: getattr(drawn, name) for name in drawn.__dataclass_fields__})
    chosen = search(recipe, device, toy.tools(MARGIN)).chosen
    assert chosen is not None
    assert chosen.recipe.checkpointing == least.checkpointing

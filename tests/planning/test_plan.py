"""What a plan holds and answers: the JSON's shape, the chosen recipe, and what to do where nothing fits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.planning.ops import gpu
from tests.planning.toy import Toy
from tests.planning.toy import replay as toy_replay
from tightfit.devices import GIB, MIB, Device
from tightfit.errors import RecipeError, Refused
from tightfit.planning.costs import FitRank
from tightfit.planning.estimate import Margin, estimate
from tightfit.planning.search.explain import memory_shortfall
from tightfit.planning.search.search import MOST_TRACES, search
from tightfit.recipe import CHOICES, Recipe
from tightfit.text import size
from tightfit.trace import Allocation, UntracedMemory

TOY = Toy.drawn(12)
HEAVY = replace(TOY, weights=10_000_000)
STATES = HEAVY.blocks * HEAVY.weights
PINS = {"precision": "bf16", "checkpointing": "none", "micro_batch_size": 8, "optimizer": "adamw", "attention": "sdpa",
        "compile": "off"}
MARGIN = Margin(share=0.0, fixed=0)


def of(toy, memory, catalogue=(), evaluator=None, **fields):
    recipe = Recipe.from_dict({"batch_size": 16, "vocab_size": 50_304, **fields})
    plan = search(recipe, gpu(memory), toy.tools(MARGIN), catalogue=catalogue, evaluator=evaluator)
    assert plan.predictions <= MOST_TRACES
    return plan


def needed(toy, **fields):
    """Bytes of a device that a settled recipe just fits."""
    return of(toy, 1 << 40, **{**PINS, **fields}).chosen.estimate.memory.used


def test_json_has_the_documented_shape():
    plan = of(TOY, 30 * MIB)
    told = json.loads(json.dumps(plan.to_json()))
    assert list(told) == ["device", "candidates"]
    assert told["device"] == {"name": "toy", "memory_bytes": 30 * MIB, "host_memory_bytes": 32 << 30,
                              "host_memory_assumed": True}
    assert [c["rank"] for c in told["candidates"]] == list(range(1, len(plan.candidates) + 1))
    assert {c["fits"] for c in told["candidates"]} == {"yes", "no"}
    for candidate in told["candidates"]:
        assert list(candidate) == ["rank", "recipe", "fits", "memory", "time", "calibrated", "untraced", "reasons"]
        memory = candidate["memory"]
        assert list(memory) == ["peak_reserved", "peak_allocated", "context", "driver", "driver_low", "driver_high",
                                "host", "by_category"]
        assert list(candidate["time"]) == ["step_seconds", "samples_per_second", "tokens_per_second", "mfu",
                                           "intervals"]
        counts = [*memory["by_category"].values(), *(memory[k] for k in memory if k != "by_category")]
        assert all(type(count) is int for count in counts)
        assert sum(memory["by_category"].values()) == memory["peak_allocated"]
        assert candidate["calibrated"] is False
        figure = ["name", "bytes", "where", "source", "uncertainty"]
        assert [list(untraced) for untraced in candidate["untraced"]] == 2 * [figure]
        assert sum(u["bytes"] for u in candidate["untraced"] if u["where"] == "context") == memory["context"] > 0
        assert candidate["reasons"]
        assert Recipe.from_dict(candidate["recipe"]).to_dict() == candidate["recipe"]


def test_candidates_are_ranked_and_differ():
    plan = of(TOY, 30 * MIB, offload="none")
    assert plan.candidates[0] is plan.chosen
    assert plan.recipe == plan.chosen.recipe
    fitting = [c for c in plan.candidates if c.estimate.fit_rank is FitRank.SAFE]
    speeds = [c.estimate.time.tokens_per_second for c in fitting[1:]]
    assert speeds == sorted(speeds, reverse=True)
    assert len({json.dumps(c.choices()) for c in plan.candidates}) == len(plan.candidates) > 2
    assert all(set(c.choices()) == set(CHOICES) for c in plan.candidates)
    assert [c.estimate.memory.verdict for c in plan.candidates] == ["yes"] * len(fitting) + ["no"] * (
        len(plan.candidates) - len(fitting))


def test_says_why_and_what_the_next_best_costs():
    plan = of(TOY, 30 * MIB)
    answers = plan.answers
    assert "fastest that fit" in answers.why
    assert answers.next_best in plan.reasons
    assert " faster, " in answers.next_best
    assert answers.next_best.endswith("; times within 5.0 % count as equal, and the choice changes 1 field fewer.")
    assert answers.would_not_fit
    for sentence, candidate in zip(answers.would_not_fit, [c for c in plan.candidates if c.estimate.missing],
                                   strict=True):
        assert sentence in candidate.reasons
        assert "does not fit" in sentence


@pytest.mark.parametrize(("seed", "expected"), [
    (13, " faster, 5.1 MiB less at the peak; the choice changes numerics less."),
    (20, "checkpointing=attention: 2.7 % slower, as much memory at the peak."),
    (21, "; times within 5.0 % count as equal, and the choice changes 2 fields fewer."),
])
def test_the_next_best_says_why_it_is_not_the_choice(seed, expected):
    assert of(Toy.drawn(seed), 30 * MIB).answers.next_best.endswith(expected)


def test_where_nothing_fits_the_plan_says_what_would():
    plan = of(HEAVY, 3 * STATES, offload="none")
    assert plan.chosen is None
    assert {c.estimate.memory.verdict for c in plan.candidates} == {"no"}
    misses = [c.estimate.missing for c in plan.candidates]
    assert misses == sorted(misses)
    with pytest.raises(Refused, match="nothing fits on toy"):
        plan.recipe  # noqa: B018 - the property raises


@pytest.mark.parametrize(("pins", "memory_of", "text"), [
    (PINS, {"micro_batch_size": 4}, "micro_batch_size=4"),
    (PINS, {"micro_batch_size": 1}, "micro_batch_size=1"),
    ({**PINS, "micro_batch_size": 1}, {"micro_batch_size": 1, "checkpointing": "selective"},
     "checkpointing=selective"),
    ({**PINS, "micro_batch_size": 1}, {"micro_batch_size": 1, "checkpointing": "every-block"},
     "checkpointing=every-block"),
])
def test_names_the_smallest_change(pins, memory_of, text):
    toy = replace(TOY, saved={"attention": 900_000, "mlp": 900_000, "norm": 900_000}, entry=20_000)
    plan = of(toy, needed(toy, **memory_of), **pins)
    assert plan.chosen is None
    assert plan.answers.smallest_change.text == text
    assert plan.answers.smallest_change.estimate.fit_rank is FitRank.SAFE
    assert text in plan.nothing_fits()


def test_says_where_no_single_change_helps():
    alone = of(HEAVY, 3 * STATES, offload="none").answers
    assert alone.smallest_change is None
    assert alone.smallest_change_text.startswith("No single change would make it fit: weights, gradients and optimizer")
    told = of(HEAVY, 3 * STATES, offload="none")
    assert alone.smallest_change_text in told.reasons
    assert "no single change would make it fit" in told.nothing_fits()
    assert of(HEAVY, 40 * STATES).answers.smallest_change_text == ""


def test_names_what_helps_together_where_no_single_change_does():
    toy = replace(TOY, saved={"attention": 900_000, "mlp": 900_000, "norm": 900_000}, entry=20_000)
    both = needed(toy, micro_batch_size=2, checkpointing="every-block")
    answers = of(toy, both, **PINS).answers
    assert answers.smallest_change is None
    assert answers.smallest_change_text == ("No single change would make it fit; together these would: "
                                            "micro_batch_size=2 checkpointing=every-block.")


def test_a_limit_on_traces_is_not_taken_for_an_answer(monkeypatch):
    toy = replace(TOY, saved={"attention": 900_000, "mlp": 900_000, "norm": 900_000}, entry=20_000)
    memory = needed(toy, micro_batch_size=1)
    recipe = Recipe.from_dict({"batch_size": 16, "vocab_size": 50_304, **PINS})
    monkeypatch.setattr("tightfit.planning.search.budget.ANSWER_TRACES", 0)
    answers = search(recipe, gpu(memory), toy.tools(MARGIN)).answers
    assert answers.smallest_change_text == ("No single change was found that would make it fit: the limit on traces "
                                            "was reached.")


def test_images_are_not_told_of_shorter_sequences():
    toy = replace(HEAVY, calls=[])
    of(toy, 10 * STATES, **{**PINS, "model": "vit-base", "task": "image-classification", "micro_batch_size": 1})
    assert {call.seq_len for call in toy.calls} == {Recipe().seq_len}


def test_what_is_needed_is_what_there_is_and_what_is_missing():
    plan = of(HEAVY, 3 * STATES, offload="none")
    for candidate, sentence in zip(plan.candidates, plan.answers.would_not_fit, strict=True):
        memory = candidate.estimate.memory
        assert memory.needed == plan.device.memory_bytes + memory.missing == memory.used
        assert f"it needs {size(memory.needed)}, " in sentence
        assert f", {size(memory.missing)} more than there are; the peak is in the " in sentence
    freed = replace(memory, missing=memory.missing - 50 * MIB)
    assert freed.needed == memory.used - 50 * MIB
    assert f"it needs {size(freed.needed)}, " in memory_shortfall("it", freed)
    assert f", {size(memory.used)} before the caching allocator frees unused blocks" in memory_shortfall("it", freed)
    assert replace(memory, missing=0).needed == memory.used


def test_what_the_host_lacks_is_told_as_its_own():
    memory = of(HEAVY, 10 * STATES, offload="none").candidates[0].estimate.memory
    host = replace(memory, missing=0, host=64 * GIB, host_missing=24 * GIB, host_assumed=False)
    assert memory_shortfall("it", host) == ("it does not fit: it needs 64.0 GiB of host memory, 24.0 GiB more than "
                                            "there are.")
    assert host.lacking == "24.0 GiB of host memory"
    assert replace(host, missing=GIB).lacking == "1.0 GiB and 24.0 GiB of host memory"
    assert memory.lacking == size(memory.missing)


def test_says_why_nothing_in_half_precision_is_chosen():
    """Weights, gradients and AdamW's states are 16 bytes a number, autocast's copies 2 more."""
    plan = of(HEAVY, 17.4 * STATES, offload="none")
    assert plan.recipe.precision.name == "fp32"
    half = next(c for c in plan.candidates if c.recipe.precision.name == "bf16")
    least = min(needed(HEAVY, precision="bf16", micro_batch_size=m, checkpointing="every-block") for m in (1, 16))
    assert half.estimate.memory.needed <= least
    assert "Nothing fits in bf16: autocast keeps 16-bit copies of the weights" in plan.answers.why
    assert f", misses {size(half.estimate.missing)}." in plan.answers.why
    assert "Nothing fits in" not in of(HEAVY, 17.4 * STATES, precision="fp32", offload="none").answers.why
    assert "Nothing fits in" not in of(HEAVY, 20 * STATES).answers.why
    margin = Margin(share=0.0, fixed=20 * MIB)
    recipe = Recipe.from_dict({"batch_size": 16, "vocab_size": 50_304, "offload": "none"})
    close = search(recipe, gpu(17.4 * STATES + 20 * MIB), HEAVY.tools(margin)).answers.why
    assert "Nothing in bf16 leaves the safety margin: autocast" in close


def test_an_optimizer_is_the_change_where_states_are_too_large():
    settled = {**PINS, "micro_batch_size": 1, "checkpointing": "every-block"}
    plan = of(HEAVY, needed(HEAVY, **{**settled, "optimizer": "adamw-8bit"}), **settled)
    assert plan.answers.smallest_change.text == "optimizer=adamw-8bit"


def test_a_shorter_sequence_is_not_tried_where_states_alone_are_too_large():
    plan = of(HEAVY, 9 * STATES, **{**PINS, "micro_batch_size": 1, "checkpointing": "every-block",
                                    "optimizer": "adamw-4bit"})
    assert plan.answers.smallest_change is None or "seq_len" not in plan.answers.smallest_change.text


def test_names_the_smallest_gpu():
    most = needed(TOY, micro_batch_size=1)
    recipe = Recipe.from_dict({**PINS, "batch_size": 16, "micro_batch_size": 1, "loading": {"workers": 2}})
    cards = [gpu(most // 2, "small"), gpu(most, "fitting"), gpu(4 * most, "large"), gpu(2 * most, "medium")]
    answers = of(TOY, 8 * most, catalogue=cards, **{**PINS, "micro_batch_size": 1}).answers
    assert answers.smallest_gpu.name == "fitting"
    assert "fitting" in answers.smallest_gpu_text
    card = answers.smallest_gpu
    assert estimate(TOY.predict(recipe, card), recipe, card, TOY.tools(MARGIN)).fit_rank is FitRank.SAFE
    assert of(TOY, most // 2, catalogue=cards, **{**PINS, "micro_batch_size": 1}).answers.smallest_gpu.name == "fitting"
    alone = of(TOY, most, catalogue=cards[:1], **{**PINS, "micro_batch_size": 1}).answers
    assert "No smaller GPU" in alone.smallest_gpu_text
    none = of(TOY, most // 3, catalogue=cards[:1], **{**PINS, "micro_batch_size": 1}).answers
    assert none.smallest_gpu is None
    assert "No GPU of the catalogue" in none.smallest_gpu_text


def test_an_older_gpu_is_judged_by_what_it_computes_in():
    most = needed(TOY, micro_batch_size=1)
    older = gpu(2 * most, "older", (7, 0))
    pinned = of(TOY, 8 * most, catalogue=[older, gpu(4 * most, "newer")], **{**PINS, "micro_batch_size": 1}).answers
    assert pinned.smallest_gpu.name == "newer"
    free = {name: value for name, value in PINS.items() if name != "precision"}
    left = of(TOY, 8 * most, catalogue=[older, gpu(4 * most, "newer")], **{**free, "micro_batch_size": 1}).answers
    assert left.smallest_gpu.name == "older"


@pytest.mark.parametrize("capability", [(8, 0), (7, 5)])
def test_the_smallest_gpu_is_the_same_whichever_is_planned_for(capability):
    """Though contexts differ, and so does what is there without flash attention."""
    most = needed(TOY, micro_batch_size=1, precision="fp32")

    def untraced(recipe, device, trace):
        return [UntracedMemory(name="context", bytes=device.units * MIB, where="context", source="made up")]

    def predict(recipe, device):
        trace = TOY.predict(recipe, device)
        bias = Allocation(born=1, died=None, bytes=0 if device.has_flash else most)
        return replace(trace, untraced=untraced(recipe, device, trace), allocations=[*trace.allocations, bias])

    cards = [replace(gpu(most, "small", (8, 6)), units=3), replace(gpu(2 * most, "larger", (8, 6)), units=3)]
    recipe = Recipe.from_dict({"batch_size": 16, "vocab_size": 50_304, **PINS, "micro_batch_size": 1,
                               "precision": "fp32"})
    tools = replace(TOY.tools(MARGIN), predict=predict, untraced=untraced)
    planned = replace(gpu(8 * most, "planned for", capability), units=9)
    assert search(recipe, planned, tools, catalogue=cards).answers.smallest_gpu.name == "small"


def test_a_gpu_that_is_too_small_once_traced_is_passed_over_with_those_that_are_no_larger():
    most = needed(TOY, micro_batch_size=1)
    tight = replace(TOY, calls=[])

    def wasteful(trace, capacity, settings):
        found = toy_replay(trace, capacity, settings)
        found.peak_reserved += most // 2
        found.missing = 0 if capacity is None else max(found.peak_reserved - capacity, 0)
        found.fits = "no" if found.missing else "yes"
        return found

    cards = [gpu(most * share / 10, f"{share} tenths") for share in (11, 12, 13, 14, 16)]
    recipe = Recipe.from_dict({"batch_size": 16, "vocab_size": 50_304, **PINS, "micro_batch_size": 1})
    tools = replace(tight.tools(MARGIN), replay=wasteful)
    answers = search(recipe, gpu(8 * most), tools, catalogue=cards).answers
    assert answers.smallest_gpu.name == "16 tenths"
    assert "micro_batch_size=1 checkpointing=none" in answers.smallest_gpu_text


def test_warns_of_misaligned_dimensions_with_the_gain_from_padding():
    def slower(trace, recipe, device):
        timed = TOY.seconds(trace, recipe, device)
        return timed if recipe.pad_vocab_to else replace(timed, seconds=timed.seconds * 1.25)

    recipe = Recipe(batch_size=16)  # gpt2: 50,257 words
    plan = search(recipe, gpu(1 << 34), replace(TOY.tools(), step_time=slower))
    found = plan.answers.misaligned
    assert [(m.field, m.value, m.multiple, m.padded) for m in found] == [("vocab_size", 50_257, 64, 50_304)]
    assert found[0].gain == pytest.approx(0.2)
    assert "pad_vocab_to=64" in found[0].sentence
    assert found[0].sentence in plan.reasons


@pytest.mark.parametrize(("faster", "packing", "said"), [(0.8, True, True), (0.99, True, False), (0.8, False, False)])
def test_dropout_inside_attention_that_costs_packed_rows_a_mask_is_said(faster, packing, said):
    tools = TOY.tools(MARGIN)

    def step_time(trace, recipe, device):
        timed = tools.step_time(trace, recipe, device)
        return replace(timed, seconds=timed.seconds * faster) if "attn_pdrop" in recipe.model_overrides else timed

    recipe = Recipe.from_dict({**PINS, "batch_size": 16, "vocab_size": 50_304, "data": {"packing": packing}})
    plan = search(recipe, gpu(1 << 40), replace(tools, step_time=step_time))
    assert bool(plan.answers.dropout) is said
    if said:
        assert "model_overrides.attn_pdrop=0, is predicted to make a step 20 % shorter" in plan.answers.dropout


def test_on_the_processor_training_arguments_say_so():
    recipe = Recipe.from_dict({"batch_size": 4, "compile": "off", "loss": "plain"})
    plan = search(recipe, Device(kind="cpu", name="CPU", memory_bytes=1 << 34), TOY.tools())
    assert plan.training_arguments()["use_cpu"] is True
    assert search(recipe, gpu(1 << 34), TOY.tools()).training_arguments()["use_cpu"] is False


def test_adapters_are_the_models_own_and_no_training_arguments():
    recipe = Recipe.from_dict({"batch_size": 4, "loss": "plain", "trainable": "lora"})
    with pytest.warns(UserWarning, match=r"trainable=lora base=bf16: TrainingArguments do not say it"):
        search(recipe, gpu(1 << 34), TOY.tools()).training_arguments()


def test_a_loss_without_whole_logits_is_no_trainers():
    with pytest.raises(RecipeError, match=r"loss=chunked: .* write loss=plain"):
        search(Recipe(batch_size=4), gpu(1 << 34), TOY.tools()).training_arguments()

"""What a plan holds and answers: the JSON's shape, the chosen recipe, and what to do where nothing fits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.planning.toy import MIB, Toy
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.planning.estimate import Margin, estimate
from tightfit.planning.plan import CHOICES
from tightfit.planning.search.search import TRACES, search
from tightfit.recipe import Recipe

TOY = Toy.drawn(12)
HEAVY = replace(TOY, weights=10_000_000)
STATES = HEAVY.blocks * HEAVY.weights
PINS = {"precision": "bf16", "checkpointing": "none", "micro_batch_size": 8, "optimizer": "adamw", "attention": "sdpa",
        "compile": "off"}
MARGIN = Margin(share=0.0, fixed=0)


def gpu(memory, name="toy", capability=(8, 0)):
    return Device(kind="cuda", name=name, memory_bytes=int(memory), capability=capability)


def of(toy, memory, catalogue=(), host_bytes=1 << 40, **fields):
    recipe = Recipe.from_dict({"batch_size": 16, "vocab_size": 50_304, **fields})
    plan = search(recipe, gpu(memory), toy.tools(), margin=MARGIN, catalogue=catalogue, host_bytes=host_bytes)
    assert plan.predictions <= TRACES
    return plan


def needed(toy, **fields):
    """Bytes of a device that a settled recipe just fits."""
    return of(toy, 1 << 40, **{**PINS, **fields}).chosen.estimate.memory.used


def test_json_has_the_documented_shape():
    plan = of(TOY, 60 * MIB)
    told = json.loads(json.dumps(plan.to_json()))
    assert list(told) == ["device", "candidates"]
    assert told["device"] == {"name": "toy", "memory_bytes": 60 * MIB}
    assert [c["rank"] for c in told["candidates"]] == list(range(1, len(plan.candidates) + 1))
    assert {c["fits"] for c in told["candidates"]} == {"yes", "no"}
    for candidate in told["candidates"]:
        assert list(candidate) == ["rank", "recipe", "fits", "memory", "time", "reasons"]
        memory = candidate["memory"]
        assert list(memory) == ["peak_reserved", "peak_allocated", "context", "host", "by_category"]
        assert list(candidate["time"]) == ["step_seconds", "samples_per_second", "tokens_per_second", "mfu"]
        counts = [*memory["by_category"].values(), *(memory[k] for k in memory if k != "by_category")]
        assert all(type(count) is int for count in counts)
        assert sum(memory["by_category"].values()) == memory["peak_allocated"]
        assert candidate["reasons"]
        assert Recipe.from_dict(candidate["recipe"]).to_dict() == candidate["recipe"]


def test_candidates_are_ranked_and_differ():
    plan = of(TOY, 60 * MIB)
    assert plan.candidates[0] is plan.chosen
    assert plan.recipe == plan.chosen.recipe
    fitting = [c for c in plan.candidates if c.estimate.fits == "yes"]
    speeds = [c.estimate.time.tokens_per_second for c in fitting[1:]]
    assert speeds == sorted(speeds, reverse=True)
    assert len({json.dumps(c.choices()) for c in plan.candidates}) == len(plan.candidates) > 2
    assert all(set(c.choices()) == set(CHOICES) for c in plan.candidates)
    assert [c.estimate.fits for c in plan.candidates] == ["yes"] * len(fitting) + ["no"] * (
        len(plan.candidates) - len(fitting))


def test_says_why_and_what_the_next_best_costs():
    plan = of(TOY, 60 * MIB)
    answers = plan.answers
    assert "The fastest that fits" in answers.why
    assert answers.next_best
    assert answers.next_best in plan.chosen.reasons
    assert ("slower" in answers.next_best) or ("faster" in answers.next_best) or ("as fast" in answers.next_best)
    assert answers.would_not_fit
    for sentence, candidate in zip(answers.would_not_fit, [c for c in plan.candidates if c.estimate.missing],
                                   strict=True):
        assert sentence in candidate.reasons
        assert "does not fit" in sentence


def test_where_nothing_fits_the_plan_says_what_would():
    plan = of(HEAVY, 3 * STATES)
    assert plan.chosen is None
    assert {c.estimate.fits for c in plan.candidates} == {"no"}
    misses = [c.estimate.missing for c in plan.candidates]
    assert misses == sorted(misses)
    with pytest.raises(Refused, match="nothing fits on toy"):
        plan.recipe  # noqa: B018 - the property raises
    assert plan.answers.offload.branch == "cpu"
    assert all(sentence in plan.candidates[0].reasons for sentence in plan.answers.offload.sentences)
    assert of(HEAVY, 3 * STATES, host_bytes=10 * STATES).answers.offload.branch == "nvme"
    assert of(HEAVY, 20 * STATES).answers.offload is None


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
    assert plan.answers.smallest_change.estimate.fits == "yes"
    assert text in plan.nothing_fits()


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
    assert estimate(TOY.predict(recipe, card), recipe, card, TOY.tools(), MARGIN).fits == "yes"
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
    assert found[0].sentence in plan.chosen.reasons

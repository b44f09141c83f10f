"""The search for inference, on a model whose cost is a closed form: what it tries, chooses and answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from tests.planning.ops import gpu
from tests.planning.search.declared import replay
from tests.planning.toy import toy_tools
from tightfit.backends import load_backend
from tightfit.errors import ModelError, Refused
from tightfit.planning.estimate import Margin
from tightfit.planning.search.search import search
from tightfit.planning.timing.step_time import StepTime
from tightfit.recipe import Recipe
from tightfit.trace import Allocation, Category, Op, OpClass, Phase, Span, Trace, UntracedMemory

MIB = 1 << 20
WEIGHTS, CACHE, SCORES, CONTEXT = 400 * MIB, 10 * MIB, 30 * MIB, 50 * MIB
RATE = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.5}
"""Seconds of a forward pass by precision, autocast's casts apart."""


def asked(**fields):
    return Recipe.from_dict({"model": "gpt2", "mode": "inference", "batch_size": 8, "seq_len": 64,
                             "inference": {"new_tokens": 16}, **fields})


def used(recipe):
    """Bytes: weights, autocast's copy, keys and values of every prompt, eager's scores."""
    pure = recipe.precision.name != "fp32" and recipe.precision.full_eval
    weights = WEIGHTS // 2 if pure else WEIGHTS
    copies = 0 if pure or recipe.precision.name == "fp32" else WEIGHTS // 2
    size = 4 if recipe.precision.name == "fp32" else 2
    scores = SCORES * (recipe.attention.name == "eager")
    return weights + copies, recipe.batch_size * (CACHE * size // 2 + scores)


def seconds(recipe):
    autocast = recipe.precision.name != "fp32" and not recipe.precision.full_eval
    return (RATE[recipe.precision.name] + 0.1 * autocast) * (1.5 if recipe.attention.name == "eager" else 1.0)


class Toy:
    def __init__(self):
        self.asked = []

    def predict(self, recipe, device):
        self.asked.append(recipe)
        assert not recipe.refusals(device)
        assert recipe.micro_batch_size == recipe.batch_size
        weights, rest = used(recipe)
        tick = 4 if recipe.inference.new_tokens > 1 else 2
        made = [
            Allocation(born=0, died=None, bytes=weights, category=Category.WEIGHTS, op="", shape=(1,), dtype="x"),
            Allocation(born=tick, died=tick + 1, bytes=rest, category=Category.KV_CACHE, op="", shape=(1,), dtype="x"),
        ]
        ops = [Op(name="pass", tick=at, phase=phase, op_class=OpClass.OTHER, shapes=((1,),))
               for at, phase in ((2, Phase.PREFILL), (4, Phase.DECODE))]
        spans = [Span(name="prefill", start=1, stop=3), Span(name="decode", start=3, stop=6, times=15)]
        untraced = [UntracedMemory(name="context", bytes=CONTEXT, where="context", source="drawn")]
        return Trace(origin="predicted", ops=ops, allocations=made, spans=spans, untraced=untraced)

    def tools(self):
        def timed(trace, recipe, device):
            return StepTime(seconds=seconds(recipe) * sum(times for _, times in trace.step_ops()) + 7.0, data=7.0)

        return toy_tools(self.predict, timed, replay, Margin(share=0.0, fixed=0))


def found(recipe, device, **kwargs):
    toy = Toy()
    return search(recipe, device, toy.tools(), **kwargs), toy


def chosen(plan):
    return plan.recipe.precision.name, getattr(plan.recipe.precision, "full_eval", False), plan.recipe.attention.name


def test_the_fastest_that_fits_is_chosen_and_its_figures_are_the_traces_own():
    plan, toy = found(asked(), gpu(4096 * MIB))
    assert chosen(plan) == ("bf16", True, "sdpa")
    time, memory = plan.chosen.estimate.time, plan.chosen.estimate.memory
    assert time.step_seconds == pytest.approx(0.5 * 16)  # 15 passes after the prefill; no global batch is waited for
    assert time.prefill_seconds == pytest.approx(0.5)
    assert time.tokens_per_second == pytest.approx(8 * 16 / (0.5 * 16))
    assert memory.peak_allocated == sum(used(plan.recipe))
    assert memory.by_category["kv-cache"] == 8 * CACHE
    assert memory.peak_in == "decoding"
    assert len(toy.asked) == plan.predictions == plan.tried == 6
    speeds = [c.estimate.time.step_seconds for c in plan.candidates]
    assert len(speeds) == 5
    assert speeds == sorted(speeds)


def test_half_precision_is_the_one_that_the_gpu_computes_in():
    assert chosen(found(asked(), gpu(4096 * MIB, capability=(7, 5)))[0]) == ("fp16", True, "sdpa")


def test_what_is_pinned_stays():
    plan, toy = found(asked(precision="fp32", attention="eager"), gpu(4096 * MIB))
    assert chosen(plan) == ("fp32", False, "eager")
    assert len(toy.asked) == 1
    assert plan.recipe.compile.name == "off"


def test_pins_that_only_training_reads_are_named_in_one_note():
    pins = {"micro_batch_size": 64, "optimizer": "lion", "checkpointing": {"name": "every-nth", "n": 3}}
    plan, _ = found(asked(**pins), gpu(4096 * MIB))
    told = ("micro_batch_size=64, checkpointing=every-nth checkpointing.n=3, optimizer=lion: for training alone, and "
            "not read with mode=inference.")
    assert plan.answers.unread == (told,)
    assert told in plan.to_json()["candidates"][0]["reasons"]
    assert found(asked(), gpu(4096 * MIB))[0].answers.unread == ()


def test_weights_of_fewer_bits_are_refused_and_arguments_without_effect_noted():
    with pytest.raises(Refused, match="generating with nf4 weights is not planned; write base=as-is"):
        found(asked(base="nf4", trainable="lora"), gpu(4096 * MIB))
    plan, _ = found(asked(hugging_face={"do_train": True}), gpu(4096 * MIB))
    assert plan.answers.unread == ("hugging_face: without effect here: do_train",)


def test_what_does_not_fit_is_named_by_the_batch():
    plan, _ = found(asked(batch_size=4), gpu(CONTEXT + WEIGHTS // 2))
    assert plan.chosen is None
    assert all(sentence.startswith("batch_size=4") for sentence in plan.answers.would_not_fit[:1])
    assert not any("micro_batch_size" in sentence for sentence in plan.answers.would_not_fit)


def test_where_nothing_fits_a_smaller_batch_and_a_larger_gpu_are_named():
    needed = CONTEXT + WEIGHTS // 2 + 3 * CACHE
    larger = [gpu(900 * MIB, "large"), gpu(400 * MIB, "middle", (7, 5))]
    plan, _ = found(asked(), gpu(needed), catalogue=larger)
    assert plan.chosen is None
    assert plan.candidates[0].estimate.missing == 5 * CACHE
    assert plan.answers.smallest_change.text == "batch_size=2"
    assert plan.answers.smallest_gpu.name == "middle"
    assert "fp16" in plan.answers.smallest_gpu_text
    with pytest.raises(Refused, match="batch_size=2"):
        _ = plan.recipe


def test_where_not_even_one_prompt_fits_no_batch_is_named():
    plan, _ = found(asked(), gpu(CONTEXT + WEIGHTS // 2))
    assert plan.answers.smallest_change is None
    assert plan.answers.smallest_change_text == "No smaller batch would make it fit, not even batch_size=1."
    assert plan.answers.smallest_change_text in plan.reasons
    assert "no smaller batch would make it fit" in plan.nothing_fits()


def test_progress_is_steady_and_says_which_gpu_is_asked_about():
    told = []
    found(asked(), gpu(CONTEXT + WEIGHTS // 2 + 3 * CACHE), catalogue=[gpu(900 * MIB, "large")],
          progress=lambda *state: told.append(state))
    assert [done for done, _, _ in told] == list(range(len(told)))
    assert len({most for _, most, text in told if text != "done"}) == 1
    texts = [text for _, _, text in told]
    assert "now batch_size=2" in texts
    assert "now whether large would do" in texts


def test_a_departure_from_the_usual_format_has_to_be_worth_it(monkeypatch):
    monkeypatch.setitem(RATE, "fp32", 0.495)
    assert chosen(found(asked(), gpu(4096 * MIB))[0]) == ("bf16", True, "sdpa")
    monkeypatch.setitem(RATE, "fp32", 0.4)
    assert chosen(found(asked(), gpu(4096 * MIB))[0]) == ("fp32", False, "sdpa")


def test_what_cannot_be_built_is_told_and_what_cannot_be_traced_raises():
    def tools(fails):
        toy = Toy()

        def predict(recipe, device):
            if fails(recipe):
                raise ModelError("model: op x in y cannot be traced")
            return toy.predict(recipe, device)

        return replace(toy.tools(), predict=predict, model_size=load_backend("pytorch").model_size)

    plan = search(asked(), gpu(4096 * MIB), tools(lambda r: r.attention.name == "sdpa"))
    assert chosen(plan)[2] == "eager"
    assert plan.notes == ("left out: model: op x in y cannot be traced",)
    with pytest.raises(ModelError, match=r"op x in y cannot be traced; what can still be said: 124,439,808 parameters"):
        search(asked(), gpu(4096 * MIB), tools(lambda r: True))


def test_a_plan_of_inference_is_plain_json_and_has_no_training_arguments():
    plan, _ = found(asked(), gpu(4096 * MIB))
    values = json.loads(json.dumps(plan.to_json()))
    best = values["candidates"][0]
    assert best["time"]["prefill_seconds"] == pytest.approx(0.5)
    assert math.isclose(sum(best["memory"]["by_category"].values()), best["memory"]["peak_allocated"])
    with pytest.raises(Refused, match="mode=train"):
        plan.training_arguments()

"""What a report finds: each finding from a profile that has it, and not from one that has not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.profiling.profiled import empty, hostile, predicted, profile, recipe
from tightfit.devices import find_device
from tightfit.planning.alignment import vocabulary
from tightfit.profiling.findings import findings, source_of
from tightfit.profiling.profile import Profile
from tightfit.profiling.step import steps_of
from tightfit.trace import Allocation, Category, Op, OpClass, Phase, Span, Trace

CARD = find_device("rtx-4090")


def found(made, word):
    matching = [finding for finding in findings(made) if word in finding.sentence]
    assert len(matching) <= 1
    return matching[0] if matching else None


def made_of(ops=(), allocations=(), step=1.0, **fields):
    """A measured step of one second, with a forward pass alone."""
    trace = Trace(origin="measured", ops=list(ops), allocations=list(allocations), spans=[
        Span(name="step 1", start=0, stop=1000, step=1), Span(name="forward", start=0, stop=1000, step=1)])
    return Profile(recipe=recipe(**fields), device=CARD, step_seconds=step, measured=trace,
                   phase_seconds={Phase.DATA: 0.0, Phase.FORWARD: step}, capacity_bytes=CARD.memory_bytes)


def op(name, seconds, op_class=OpClass.ELEMENTWISE):
    return Op(name=name, tick=1, phase=Phase.FORWARD, op_class=op_class, seconds=seconds)


def tensor(size, **changes):
    values = {"category": Category.ACTIVATIONS, "category_since": 1, "dtype": "float32", "op": "aten._softmax.default",
              "module": "h.3.attn"}
    return Allocation(born=1, died=900, bytes=size, **{**values, **changes})


def test_the_wait_for_data_and_the_workers_that_hide_it():
    waits = found(profile(), "waits for data")
    assert waits.sentence == "18 % of the step waits for data"
    assert waits.change == "loading.workers=1"
    assert waits.seconds == pytest.approx(0.18)  # it is hidden in the rest of the step
    assert waits.gain == "up to 18 % of the step"
    assert found(profile(waiting=0.005), "waits for data") is None


def test_as_many_workers_as_prepare_a_batch_while_the_step_computes():
    waits = found(profile(waiting=0.9), "waits for data")
    assert waits.change == "loading.workers=9"
    assert waits.seconds == pytest.approx(0.9)
    waits = found(replace(profile(waiting=0.3), recipe=recipe(loading={"workers": 6})), "waits for data")
    assert waits.change == "loading.workers=9"  # 6 steps a batch, over the 70 % of a step that computes


def test_no_more_workers_are_proposed_than_a_machine_may_have_cores_for():
    waits = found(profile(waiting=0.98), "waits for data")
    assert waits.change == "loading.workers=16"
    assert waits.seconds == pytest.approx(0.98 - (0.98 / 16 - 0.02))


def test_a_misaligned_vocabulary_with_the_time_models_gain():
    made = replace(profile(vocab_size=50257), recipe=recipe(vocab_size=50257))
    assert vocabulary(made.predicted) == 50257
    pad = found(made, "vocab_size")
    assert pad.sentence == "vocab_size 50,257 is not a multiple of 8, which tensor cores want: pad to 50,264"
    assert pad.change == "pad_vocab_to=8"
    assert 0.001 < pad.seconds < 0.5
    assert found(profile(vocab_size=50264), "vocab_size") is None
    unknown = found(replace(made, device=replace(CARD, bandwidth=0.0)), "vocab_size")
    assert unknown.gain == "not predicted"
    assert unknown.rank == 0


def test_a_padded_vocabularys_gain_is_a_share_of_the_measured_step():
    made = replace(profile(vocab_size=50257), recipe=recipe(vocab_size=50257))
    gain = found(made, "vocab_size").seconds
    alone = found(replace(made, predicted=None), "vocab_size")
    assert alone.seconds == gain
    assert alone.derived.startswith("the measured seconds of the ops with that dimension")
    waiting = replace(made, step_seconds=2 * made.step_seconds)
    assert found(waiting, "vocab_size").seconds == pytest.approx(gain / 2)
    slower = replace(made.measured, ops=[replace(op, seconds=3 * op.seconds) for op in made.measured.ops])
    assert gain < found(replace(made, measured=slower), "vocab_size").seconds <= 3 * gain
    compiled = replace(made.measured, ops=[replace(op, shapes=()) for op in made.measured.ops])
    assert found(replace(made, measured=compiled), "vocab_size").derived.startswith("the predicted seconds")


def test_gains_that_rest_on_the_time_model_say_that_it_is_not_calibrated():
    made = replace(profile(vocab_size=50257), recipe=recipe(vocab_size=50257))
    assert "the time model, not calibrated, saves" in found(made, "vocab_size").derived
    assert "not calibrated" not in found(made, "waits for data").derived


def test_a_step_bound_by_launches():
    made = profile()
    bound = found(made, "launch-bound")
    idle = 1 - made.phase_seconds[Phase.DATA] / made.step_seconds - (
        steps_of(made)["measured"].busy / made.step_seconds)
    assert f"{100 * idle:.0f} % of the step" in bound.sentence
    assert bound.change == "compile=per-block"
    assert bound.seconds == pytest.approx(idle)
    compiled = found(replace(made, recipe=recipe(compile="per-block")), "launch-bound")
    assert compiled.change == "compile.mode=reduce-overhead"
    assert found(made_of([op("aten.mm", 0.95)]), "launch-bound") is None
    assert found(replace(made, device=replace(CARD, kind="cpu")), "launch-bound") is None


def test_fp32_tensors_under_bf16():
    made = made_of(allocations=[tensor(3 << 30), tensor(1 << 30, op="aten._log_softmax.default", module=""),
                                tensor(1 << 30, dtype="bfloat16"), tensor(8 << 30, category=Category.WEIGHTS)])
    wide = found(made, "fp32")
    assert wide.sentence == ("4.0 GiB of fp32 tensors under bf16 at the peak: softmax in h.*.attn 3.0 GiB "
                             "and 1 more")
    assert wide.change == "attention=sdpa"
    assert wide.bytes == 3 << 30
    micro = found(replace(made, recipe=recipe(attention="sdpa")), "fp32")
    assert (micro.change, micro.bytes) == ("micro_batch_size=1", 5 << 29)
    pure = found(replace(made, recipe=recipe(attention="sdpa", micro_batch_size=1)), "fp32")
    assert (pure.change, pure.bytes) == ("precision=bf16-pure", 2 << 30)
    assert "changes numerics" in pure.derived
    for already in ({"precision": "bf16-pure"}, {"precision": "fp16"}):
        card = replace(made, device=find_device("t4"), recipe=recipe(attention="sdpa", micro_batch_size=1, **already))
        assert (found(card, "fp32").change, found(card, "fp32").bytes) == ("", None)
    assert found(replace(made, recipe=recipe(precision="fp32")), "fp32") is None


def test_copies():
    moving = [op("aten.mm", 0.5), op("aten.clone.default", 0.2, OpClass.MOVEMENT), op("aten._to_copy.default", 0.06),
              op("aten.repeat.default", 0.05, OpClass.MOVEMENT), op("aten.add", 0.1)]
    copies = found(made_of(moving), "copies memory")
    assert copies.sentence == "31 % of the step copies memory, most of it in clone (20 %)"
    assert copies.change == "compile=per-block"
    assert copies.seconds == pytest.approx(0.26)  # what repeats a tensor stays
    compiled = found(made_of(moving, compile="per-block"), "copies memory")
    assert (compiled.change, compiled.seconds) == ("", None)
    assert found(made_of([moving[0], op("Memcpy DtoD (Device -> Device)", 0.2, OpClass.MOVEMENT)]), "copies memory")
    assert found(made_of([op("aten.mm", 0.95), moving[-2]]), "copies memory") is None


@pytest.mark.parametrize("name", ["bernoulli_.float", "zero_", "fill_.Scalar", "embedding", "index.Tensor", "arange"])
def test_data_movement_that_copies_nothing_is_no_copy(name):
    other = op(f"aten.{name}", 0.4, OpClass.MOVEMENT)
    assert found(made_of([op("aten.mm", 0.5), other]), "copies memory") is None
    assert found(made_of([other, op("aten.clone", 0.2, OpClass.MOVEMENT)]), "copies memory").sentence.startswith("20 %")


def test_what_matters_most_comes_first():
    ranks = [finding.rank for finding in findings(profile())]
    assert len(ranks) >= 3
    assert ranks == sorted(ranks, reverse=True)


def test_without_traces_and_with_odd_ones():
    assert findings(replace(empty(), measured=None)) == []
    assert findings(empty()) == []
    assert findings(replace(profile(), measured=None))
    findings(hostile())


def test_a_device_of_which_nothing_is_known():
    unknown = replace(CARD, bandwidth=0.0, flops={}, units=0)
    for finding in findings(replace(profile(vocab_size=50257), device=unknown, recipe=recipe(vocab_size=50257))):
        assert finding.seconds is None or any(
            word in finding.sentence for word in ("data", "copies", "launch-bound"))


def test_sources_are_named_without_block_numbers():
    assert source_of(tensor(1)) == "softmax in h.*.attn"
    assert source_of(tensor(1, op="", module="")) == "a tensor"
    assert vocabulary(predicted()) == 257

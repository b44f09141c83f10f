"""Prefill and decoding times, read off a trace of inference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.devices import find_device
from tightfit.planning.estimate import inference_time, stage
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe import Recipe
from tightfit.trace import Op, OpClass, Phase, Span, Trace

RECIPE = Recipe.from_dict({
    "mode": "inference", "seq_len": 32, "batch_size": 6, "inference": {"new_tokens": 11, "beams": 4},
    "precision": "bf16", "attention": "sdpa",
})  # fmt: skip
H100 = find_device("h100-sxm")


def op(tick, phase, flops):
    return Op(
        name="aten.mm", tick=tick, phase=phase, op_class=OpClass.CONTRACTION, shapes=((512, 512), (512, 512)),
        dtype="bfloat16", flops=flops, bytes_read=1 << 20, bytes_written=1 << 19,
    )  # fmt: skip


TRACE = Trace(
    origin="predicted",
    ops=[
        op(1, Phase.PREFILL, 8 << 40), op(3, Phase.DECODE, 2 << 40), op(5, Phase.SETUP, 1 << 60),
        op(7, Phase.DECODE, 4 << 40),
    ],
    spans=[
        Span(name="prefill", start=0, stop=2), Span(name="decode", start=2, stop=4, times=6),
        Span(name="decode", start=6, stop=8, times=4),
    ],
)  # fmt: skip
TOOLS = standard_tools(PytorchBackend())


def test_a_stage_holds_its_own_ops_as_often_as_they_run():
    assert [(o.tick, times) for o, times in stage(TRACE, "prefill").step_ops()] == [(1, 1)]
    assert [(o.tick, times) for o, times in stage(TRACE, "decode").step_ops()] == [(3, 6), (7, 4)]
    assert list(stage(replace(TRACE, spans=TRACE.spans[:1]), "decode").step_ops()) == []


def test_prefill_and_decoding_are_timed_apart():
    found, _ = inference_time(TRACE, RECIPE, H100, TOOLS)
    decoding = found.step_seconds - found.prefill_seconds
    assert decoding == pytest.approx((6 * 2 + 4 * 4) / 8 * found.prefill_seconds, rel=0.05)
    assert found.samples_per_second == pytest.approx(6 / found.step_seconds)
    assert found.tokens_per_second == pytest.approx(6 * 11 / found.step_seconds)  # for prompts, not for beams
    assert not found.calibrated


def test_a_single_pass_decodes_nothing():
    found, _ = inference_time(replace(TRACE, spans=TRACE.spans[:1]), RECIPE, H100, TOOLS)
    assert found.step_seconds == found.prefill_seconds > 0

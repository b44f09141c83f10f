"""Profiles for the report's tests.

The predicted step is real: a small gpt2 traced for an RTX 4090. The measured one is made of it, since no such card is
here: each op gets the time model's seconds times noise, some allocations are larger or live longer, ticks become
nanoseconds. It stands in for a measurement in these tests and is none.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.devices import find_device
from tightfit.planning.timing.op_times import op_seconds
from tightfit.planning.timing.step_time import step_lanes, step_time
from tightfit.profiling.profile import Profile
from tightfit.recipe import Recipe
from tightfit.trace import Allocation, Category, Op, OpClass, Phase, Span, Trace, UntracedMemory

FIELDS = {
    "model": "gpt2",
    "model_overrides": {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64, "attn_pdrop": 0.0},
    "vocab_size": 257, "seq_len": 64, "batch_size": 8, "micro_batch_size": 2, "precision": "bf16", "loss": "plain",
    "checkpointing": "none", "optimizer": "adamw", "attention": "eager", "compile": "off",
    "loading": {"workers": 0},
}  # fmt: skip
STREAMED = {"accumulation": "by-block", "update": "with-forward", "checkpointing": "every-block", "offload": "host"}
CARD = "rtx-4090"
EVIL = "<script>alert(1)</script>"
EVILS = (EVIL, "</script><img src=x onerror=alert(2)>", '" onmouseover="alert(3)', "%{x} <b>bold</b> &amp; 'q'")
LENGTH = 20e-6
"""Seconds of a tick of the predicted trace, in the stand-in for a measured one."""


@functools.cache
def predicted(**fields):
    """The step of a recipe as it is predicted, with the time model's seconds. Not to be changed."""
    trace = PytorchBackend().predict(recipe(**fields), find_device(CARD))
    for op in trace.ops:
        op.seconds = op_seconds(op, find_device(CARD))
    return trace


def recipe(**fields):
    return Recipe.from_dict({**FIELDS, **fields})


def measured(trace, device, seed=0):
    """A stand-in for a measured trace: the second step alone, its micro-batches one by one."""
    random = np.random.default_rng(seed)
    step = trace.last_step()
    parts = sorted((s for s in trace.spans if s.step == step.step and s is not step), key=lambda s: s.start)
    order = [s for s in parts if s.times == 1 and s.name != "optimizer"]
    order += [s for s in parts if s.times > 1] * max(s.times for s in parts)
    order += [s for s in parts if s.name == "optimizer"]
    made, now = Trace(origin="measured", notes=["a stand-in for a measurement"]), 0
    kept = [a for a in trace.allocations if a.born < step.start and (a.died is None or a.died > step.start)]
    length = sum(s.stop - s.start + 1 for s in order)
    last = order[-1]  # the optimizer, which what lives through all micro-batches is released in

    def released(a, span, shift):
        if a.died is None or a.died > last.stop:
            return length
        return length - last.stop + a.died if a.died >= last.start > span.start else a.died + shift

    made.allocations += [
        replace(a, born=0, category_since=0, died=None if a.died is None else _tick(length)) for a in kept]
    for span in order:
        shift = now - span.start
        made.spans.append(Span(name=span.name, start=_tick(now), stop=_tick(now + span.stop - span.start), step=1,
                               seconds=LENGTH * (span.stop - span.start)))
        made.ops += [
            replace(op, tick=_tick(op.tick + shift),
                    seconds=op_seconds(op, device) * float(random.uniform(0.8, 1.6)))
            for op in trace.ops if span.start <= op.tick < span.stop]
        made.allocations += [
            replace(a, born=_tick(a.born + shift), category_since=_tick(a.category_since + shift),
                    died=_tick(released(a, span, shift)),
                    bytes=a.bytes if random.random() < 0.9 else round(1.3 * a.bytes))
            for a in trace.allocations if span.start <= a.born < span.stop]
        now += span.stop - span.start + 1
    made.spans.append(Span(name="step 1", start=0, stop=_tick(now), step=1, seconds=LENGTH * now))
    return made


def _tick(at):
    return round(at * LENGTH * 1e9)


@functools.cache
def profile(waiting=0.18, seed=0, **fields):
    """A whole profile: of each step 18 % are spent waiting for data."""
    settled, device, trace = recipe(**fields), find_device(CARD), predicted(**fields)
    time = step_time(trace, settled, device)
    seen = measured(trace, device, seed)
    wall = {Phase.FORWARD: 1.1 * time.forward, Phase.BACKWARD: 1.05 * (time.backward + time.recompute),
            Phase.OPTIMIZER: time.optimizer}
    wall[Phase.DATA] = waiting / (1 - waiting) * sum(wall.values())
    step = trace.last_step()
    lanes = {}
    if time.copies is not None:
        lanes["predicted"] = step_lanes(trace, settled, device)
        lanes["measured"] = tuple(replace(s, begin=1.2 * s.begin, end=1.2 * s.end) for s in lanes["predicted"])
    return Profile(
        recipe=settled, device=device, step_seconds=sum(wall.values()), measured=seen, predicted=trace,
        phase_seconds=wall,
        predicted_seconds={Phase.DATA: time.data, Phase.FORWARD: time.forward,
                           Phase.BACKWARD: time.backward + time.recompute, Phase.OPTIMIZER: time.optimizer},
        peak_bytes=seen.peak()[1] + 4096, predicted_peak_bytes=trace.peak(step.start, step.stop)[1],
        capacity_bytes=device.memory_bytes, overhead=1.4, lanes=lanes,
        readings={"utilization %": (10.0, 55.0, 60.0, None, 58.0), "power W": (90.0, 240.0, 244.0)},
        versions={"torch": "2.13.0"}, notes=("plain steps differ by 3 %",),
    )  # fmt: skip


def hostile():
    """A profile in which every name is markup."""
    good = profile()
    ops = [Op(name=EVILS[i % 4], tick=i + 1, phase=Phase.FORWARD, op_class=OpClass.CONTRACTION, module=EVILS[i % 3],
              shapes=((8, 8), (8, 8)), dtype=EVILS[i % 2], flops=1024, bytes_read=256, bytes_written=128,
              seconds=1e-4 * (i + 1)) for i in range(8)]
    allocations = [
        Allocation(born=i, died=20, bytes=1 << 20, category=Category.ACTIVATIONS, category_since=i, module=EVILS[i % 4],
                   op=EVILS[i % 3], shape=(8, 8), dtype=EVILS[i % 2]) for i in range(8)]
    spans = [Span(name=EVIL, start=0, stop=30), Span(name="step 1", start=0, stop=30, step=1),
             Span(name="forward", start=0, stop=30, step=1)]
    untraced = [UntracedMemory(name=EVIL, bytes=5, where="context", source=EVIL)]
    traces = [Trace(origin=origin, ops=ops, allocations=allocations, spans=spans, untraced=untraced, notes=list(EVILS))
              for origin in ("measured", "predicted")]
    named = good.recipe.override(output_dir=EVIL, sample_prompt=EVILS[1])
    return replace(good, recipe=named.model_copy(update={"model": EVIL}), device=replace(good.device, name=EVIL),
                   measured=traces[0], predicted=traces[1], notes=EVILS, versions={EVIL: EVIL},
                   readings={EVIL: (1.0, 2.0)})


def empty(origin="measured"):
    """A profile whose trace holds nothing."""
    good = profile()
    return replace(good, measured=Trace(origin="measured"), predicted=None, phase_seconds={}, predicted_seconds={},
                   step_seconds=0.0, peak_bytes=0, predicted_peak_bytes=None, readings={}, versions={}, notes=())

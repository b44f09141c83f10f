"""A step's time at any micro-batch from two traces, against that of a trace of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.toy import Toy
from tightfit.devices import Device
from tightfit.planning.defaults import settle_rest
from tightfit.planning.search.candidates import Config
from tightfit.planning.search.line_times import LineTimes
from tightfit.planning.search.lines import Line
from tightfit.recipe import Recipe
from tightfit.techniques.attention import Sdpa
from tightfit.techniques.checkpointing import NoCheckpointing
from tightfit.techniques.compile import NoCompile
from tightfit.techniques.optimizer import AdamW
from tightfit.techniques.precision import Fp32
from tightfit.trace import Op, OpClass, Phase

TOY = Toy.drawn(3)
DEVICE = Device(kind="cuda", name="toy", memory_bytes=1 << 40, capability=(8, 0))
CONFIG = Config(Sdpa(), Fp32(), NoCheckpointing(), NoCompile(), AdamW())


def recipe_of(batch):
    return settle_rest(Recipe(batch_size=batch), DEVICE)


def traced(micro, batch):
    return TOY.predict(CONFIG.on(recipe_of(batch), micro), DEVICE)


def truth(micro, batch):
    return TOY.seconds(traced(micro, batch), CONFIG.on(recipe_of(batch), micro), DEVICE).seconds


def line(exact, *, rigid=False):
    low, high = traced(2, 4), traced(11, 22)
    if rigid:
        high = replace(high, ops=[Op("aten.add", 0, Phase.SETUP, OpClass.ELEMENTWISE), *high.ops])
    return Line(low, 2, high, 11, exact, lambda micro: traced(micro, 16))


@pytest.mark.parametrize(("micro", "batch"), [(1, 16), (4, 16), (16, 16), (8, 20), (6, 20), (16, 20)])
def test_an_interpolated_step_takes_as_long_as_a_traced_one(micro, batch):
    """Windows whose last micro-batch is smaller included."""
    times = LineTimes(recipe_of(batch), DEVICE, TOY.tools())
    assert times.step(CONFIG, line({}), micro).seconds == pytest.approx(truth(micro, batch), rel=1e-6)


@pytest.mark.parametrize("micro", [1, 4, 16])
def test_what_cannot_be_interpolated_is_taken_to_be_affine(micro):
    """All micro-batches alike, though the first adds to no gradients."""
    times = LineTimes(recipe_of(16), DEVICE, TOY.tools())
    rigid = line({}, rigid=True)
    assert rigid.rigid
    assert times.step(CONFIG, rigid, micro).seconds == pytest.approx(truth(micro, 16), rel=0.03)


def test_a_trace_of_its_own_replaces_what_was_made():
    exact = {}
    times, made = LineTimes(recipe_of(16), DEVICE, TOY.tools()), line(exact)
    first = times.step(CONFIG, made, 4).seconds
    slower = traced(4, 16)
    exact[4] = replace(slower, ops=[replace(op, flops=2 * op.flops, bytes_read=2 * op.bytes_read)
                                    for op in slower.ops])
    assert times.step(CONFIG, made, 4).seconds == first
    times.forget(CONFIG, 4)
    assert times.step(CONFIG, made, 4).seconds > 1.5 * first


def test_the_optimizers_part_does_not_depend_on_the_micro_batch():
    times, made = LineTimes(recipe_of(16), DEVICE, TOY.tools()), line({})
    alone = times.optimizer(CONFIG, made, 2)
    assert 0 < alone < truth(2, 16)
    assert times.optimizer(CONFIG, made, 16) == alone

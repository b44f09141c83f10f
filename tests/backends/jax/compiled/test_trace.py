"""Buffers read from XLA's dump: what counts, when it is alive, and that it adds up."""

from __future__ import annotations

import re

import pytest

from tightfit.backends.jax.compiled.trace import UNUSED, read_memory
from tightfit.trace import live_bytes

ASSIGNMENT = """BufferAssignment:
allocation 0: size 400, parameter 0, shape |f32[100]| at ShapeIndex {}, maybe-live-out:
 value: <1 weight.1 @0> (size=400,offset=0): f32[100]{0}
 value: <9 update{0} @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 40, output shape is |(f32[100], f32[10])|, maybe-live-out:
 value: <8 loss @0> (size=40,offset=0): f32[10]{0}
allocation 2: size 4, thread-local:
 value: <7 add.1 @0> (size=4,offset=0): f32[]
allocation 3: size 16, constant:
 value: <6 constant.1 @0> (size=16,offset=0): f32[4]{0}
allocation 4: size 80, color 5, preallocated-temp:
 value: <5 kept.1 @0> (size=80,offset=0): f32[20]{0}
allocation 5: size 250, preallocated-temp:
 value: <2 wide @0> (size=100,offset=0): bf16[5,10]{1,0}
 value: <3 same{2} (phi) @0> (size=100,offset=0): bf16[5,10]{1,0}
 value: <4 next @0> (size=100,offset=0): f32[25]{0}
 value: <5 beside @0> (size=120,offset=128): f32[30]{0}

Total bytes used: 786
"""
LIVE = """HloLiveRange (max 9):
  InstructionSequence:
    0:weight.1
    1:wide
  BufferLiveRange:
    weight.1{}:0-9
    wide{}:1-3
    same{2}:2-5
    next{}:5-8
    beside{}:4-5
    update{0}:8-9
    loss{}:7-9
  Live ranges at 5 (peak):
    next{}: 100 bytes (cumulative: 100 bytes)
"""


@pytest.fixture(params=["", "page 0, "], ids=["0.10", "0.11"])
def assignment(request):
    """As JAX 0.10 and 0.11 have XLA write it."""
    return re.sub(r"(allocation \d+: size \d+, )", rf"\1{request.param}", ASSIGNMENT)


def temporary(assignment, makers):
    return read_memory(assignment, LIVE, makers, {})[0][2:]


def test_the_peak_is_inputs_results_of_their_own_and_the_piece_for_all_else(assignment):
    found, stop, host = read_memory(assignment, LIVE, {}, {})
    given, results, *rest = found
    assert (given.op, given.bytes, given.shape) == ("weight.1", 400, (100,))
    assert (results.op, results.bytes) == ("results", 40)
    assert live_bytes(rest)[1].max() == 250
    assert (stop, host) == (11, 80)


def test_one_array_under_two_names_is_one_and_what_is_written_over_it_another(assignment):
    found = temporary(assignment, {"wide": ("fused exp", "layer.mlp")})
    first, second, beside, free = sorted(found, key=lambda a: (a.op == UNUSED, a.op != "fused exp", a.op != "next"))
    assert (first.born, first.died, first.bytes, first.module) == (2, 6, 100, "layer.mlp")
    assert (first.dtype, first.shape) == ("bfloat16", (5, 10))
    assert (second.op, second.born, second.died) == ("next", 6, 10)
    assert (beside.op, beside.bytes) == ("beside", 120)
    assert (free.op, free.bytes) == (UNUSED, 30)


def test_an_array_that_a_loop_takes_along_is_known_by_what_writes_it_anew():
    taken = ASSIGNMENT.replace("f32[25]{0}", "bf16[5,10]{1,0}")
    found = temporary(taken, {"next": ("fused add", "accumulation")})
    assert [(a.op, a.module) for a in found if a.bytes == 100] == [("fused add", "accumulation")] * 2

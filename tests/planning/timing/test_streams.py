"""Streams against cases run by hand: copies that compute hides, that it waits for, and chains of both."""

from __future__ import annotations

import pytest

from tests.planning.ops import CPU, GPU, add
from tests.planning.timing.test_step_time import recipe
from tightfit.planning.timing.link import LINK_SHARE, PAGEABLE_SHARE
from tightfit.planning.timing.op_times import op_seconds
from tightfit.planning.timing.step_time import step_time
from tightfit.planning.timing.streams import Piece, simulate
from tightfit.trace import Op, OpClass, Phase, Span, Stream, Trace

COMPUTE, IN, OUT, HOST = Stream.COMPUTE, Stream.COPY_IN, Stream.COPY_OUT, Stream.HOST


def run(*pieces, times=1, main=COMPUTE):
    """Pieces given as (stream, seconds, ticks waited for); the tick of each is its number, the host's part is 0."""
    block = [Piece(0.0, seconds, Phase.FORWARD, stream=stream, tick=tick, after=tuple(after))
             for tick, (stream, seconds, *after) in enumerate(pieces)]
    return simulate([(block, times)], main)


def test_a_copy_that_nothing_waits_for_is_hidden():
    found = run((COMPUTE, 3.0), (OUT, 2.0, 0), (COMPUTE, 1.0))
    assert (found.seconds, found.for_streams) == (4.0, 0.0)


def test_a_copy_that_compute_waits_for_at_once_is_exposed():
    found = run((IN, 2.0), (COMPUTE, 1.0, 0), (IN, 2.0, 1), (COMPUTE, 1.0, 2))
    # the first copy of a step is issued while the step before still computes its last second
    assert (found.seconds, found.for_streams) == (5.0, 3.0)


def test_blocks_fetched_one_ahead_into_two_slots():
    """The fetch of block i waits for the compute of block i - 2, whose slot it takes; 2 seconds each, compute 3."""
    pieces = [(IN, 2.0), (IN, 2.0), (COMPUTE, 3.0, 0), (IN, 2.0, 2), (COMPUTE, 3.0, 1), (IN, 2.0, 4), (COMPUTE, 3.0, 3),
              (COMPUTE, 3.0, 5)]
    assert run(*pieces).seconds == 12.0
    slow = [(stream, 4.0 if stream is IN else 3.0, *after) for stream, _, *after in pieces]
    assert run(*slow).seconds == 4 * 4.0  # the link binds


def test_a_chain_through_every_stream_adds_up():
    found = run((COMPUTE, 1.0, 3), (OUT, 2.0, 0), (HOST, 4.0, 1), (IN, 3.0, 2))
    assert found.seconds == 1.0 + 2.0 + 4.0 + 3.0  # the first op waits for the last one's run of the step before


def test_copies_that_pile_up_bind_the_step():
    found = run((COMPUTE, 1.0), (OUT, 3.0, 0))
    assert (found.seconds, found.for_streams) == (3.0, 2.0)
    assert run((COMPUTE, 1.0), (OUT, 3.0, 0), times=10).seconds == pytest.approx(30.0)


def test_both_directions_copy_at_once():
    assert run((IN, 2.0), (OUT, 2.0), (COMPUTE, 2.0)).seconds == 2.0
    assert run((IN, 2.0), (IN, 2.0), (COMPUTE, 2.0)).seconds == 4.0


def test_repeated_blocks_take_as_long_as_written_out():
    block = [(IN, 1.5), (COMPUTE, 1.0, 0), (OUT, 0.5, 1)]
    written = [(stream, seconds, *(tick + 3 * number for tick in after))
               for number in range(7) for stream, seconds, *after in block]
    assert run(*block, times=7).seconds == pytest.approx(run(*written).seconds)


def test_where_the_host_is_the_device_everything_adds_up():
    found = run((HOST, 1.0), (HOST, 2.0, 0), (HOST, 3.0), main=HOST)
    assert (found.seconds, found.for_streams) == (6.0, 0.0)


# Through a trace


def copy(tick, size, stream, *after, name="tightfit.to_device"):
    return Op(name=name, tick=tick, phase=Phase.FORWARD, op_class=OpClass.COMMUNICATION, dtype="bfloat16",
              bytes_read=size, bytes_written=size, stream=stream, after=after)


def trace(*ops):
    return Trace(origin="predicted", ops=list(ops), spans=[Span(name="step 2", start=0, stop=99, step=2)])


def compute(tick, size, *after):
    op = add(size)
    op.tick, op.after = tick, after
    return op


def test_copies_run_at_the_links_bandwidth_and_work_hides_them():
    size, work = 10**9, 85 * 10**9  # 0.125 s of copying, 0.1 s of computing
    link = GPU.pcie_bandwidth * LINK_SHARE
    copied, computed = size / link, op_seconds(compute(0, work), GPU)
    hidden = step_time(trace(compute(1, 2 * work), copy(2, size, OUT, 1)), recipe(), GPU)
    assert hidden.seconds - hidden.data == pytest.approx(op_seconds(compute(0, 2 * work), GPU))
    exposed = step_time(trace(copy(1, size, IN, 2), compute(2, work, 1)), recipe(), GPU)
    assert exposed.seconds - exposed.data == pytest.approx(copied + computed, rel=0.01)
    assert any("waits" in note and "copies" in note for note in exposed.notes)
    ordinary = step_time(trace(copy(1, size, IN, 2, name="tightfit.to_device.pageable"), compute(2, 10, 1)),
                         recipe(), GPU)
    assert ordinary.seconds == pytest.approx(size / (GPU.pcie_bandwidth * PAGEABLE_SHARE), rel=0.01)


def test_on_a_processor_copies_are_part_of_the_step():
    alone, copied = (step_time(trace(compute(1, 10**9), *more), recipe(CPU), CPU)
                     for more in ((), [copy(2, 10**9, OUT)]))
    assert copied.seconds > 1.5 * alone.seconds


@pytest.mark.parametrize("issuing", [2e-5, 9e-6])
@pytest.mark.parametrize("copy", [0.0, 0.01, 0.5])
def test_micro_batches_that_repeat_take_what_each_takes_alone_behind_a_long_copy(copy, issuing):
    """The host runs ahead while a global batch is copied, and falls behind kernels that are shorter than it issues."""
    data = ([Piece(0.0, copy, Phase.DATA)], 1)
    block = [Piece(issuing, 1e-5, phase) for phase in (Phase.FORWARD, Phase.BACKWARD) for _ in range(20)]
    shortened, whole = (simulate([data, *segments, data], COMPUTE) for segments in ([(block, 500)], 500 * [(block, 1)]))

    assert shortened.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert shortened.for_host == pytest.approx(whole.for_host, rel=0.02)
    assert shortened.by_phase[Phase.BACKWARD] == pytest.approx(whole.by_phase[Phase.BACKWARD], rel=0.1)

"""Traces through the simulated allocator."""

from __future__ import annotations

import numpy as np
import pytest

from tightfit.devices import MIB
from tightfit.planning.allocator.replay import replay
from tightfit.planning.allocator.settings import AllocatorSettings
from tightfit.trace import Allocation, Span, Trace, UntracedMemory

EXPANDABLE = AllocatorSettings(expandable_segments=True)
WORKSPACE = 8_519_680


def trace_of(*allocations: tuple[int, int | None, int], workspaces: tuple[int, ...] = ()) -> Trace:
    """A trace of allocations given as (born, died, bytes). workspaces: the ticks at which one is asked for."""
    unseen = [UntracedMemory(name="workspace", bytes=WORKSPACE, where="allocator", source="a test", born=born)
              for born in workspaces]
    context = UntracedMemory(name="context", bytes=1 << 30, where="context", source="a test")
    return Trace(origin="predicted", allocations=[Allocation(*a) for a in allocations], untraced=[*unseen, context])


def test_peaks_and_their_ticks():
    result = replay(trace_of((1, 5, 30 * MIB), (2, 4, 19 * MIB), (3, None, 1000), (6, None, 40 * MIB)))
    assert result.peak_allocated == 50 * MIB + 1024  # 19 MiB leave 1 MiB of 20 that is not split off
    assert result.peak_tick == 3
    assert result.peak_reserved == 92 * MIB
    assert result.ticks.tolist() == [1, 2, 3, 4, 5, 6]
    assert result.allocated.tolist() == [30 * MIB, 50 * MIB, 50 * MIB + 1024, 30 * MIB + 1024, 1024, 40 * MIB + 1024]
    assert (result.fits, result.retries, result.failed_tick, result.missing) == ("yes", (), None, 0)


def test_releases_come_before_births_of_the_same_tick():
    result = replay(trace_of((5, None, 30 * MIB), (1, 5, 30 * MIB)))
    assert result.peak_reserved == 30 * MIB
    assert result.ticks.tolist() == [1, 5, 5]


def test_what_dies_in_the_tick_of_its_birth_is_released_before_the_next_birth():
    result = replay(trace_of((5, 5, 30 * MIB), (5, None, 30 * MIB)))
    assert result.peak_reserved == 30 * MIB
    assert result.allocated.tolist() == [30 * MIB, 0, 30 * MIB]


def with_steps(trace: Trace) -> Trace:
    trace.spans = [Span(name=f"step {n}", start=start, stop=stop, step=n) for n, start, stop in ((1, 1, 5), (2, 5, 9))]
    return trace


def test_what_is_cached_is_given_back_at_the_end_of_steps():
    """A step that takes 30 MiB in one piece and another in two of 24 MiB, beside 2 MiB that stay in a segment of 20."""
    trace = with_steps(trace_of((0, None, 2 * MIB), (1, 5, 30 * MIB), (5, 8, 24 * MIB), (6, 9, 24 * MIB)))
    kept = replay(trace)
    assert (kept.peak_reserved, kept.given_back, kept.pieces) == (74 * MIB, 0, 0)
    each = replay(trace, None, AllocatorSettings(empty_cache_steps=1))
    assert (each.peak_reserved, each.given_back, each.pieces) == (68 * MIB, 48 * MIB, 2)
    seldom = replay(trace, None, AllocatorSettings(empty_cache_steps=10))
    assert (seldom.peak_reserved, seldom.given_back, seldom.pieces) == (74 * MIB, 54 * MIB, 2)


def test_pages_of_expandable_segments_are_given_back_one_by_one():
    trace = with_steps(trace_of((0, None, 2 * MIB), (5, 9, 30 * MIB)))
    result = replay(trace, None, AllocatorSettings(expandable_segments=True, empty_cache_steps=1))
    assert (result.peak_reserved, result.given_back, result.pieces) == (40 * MIB, 20 * MIB, 1)
    alone = with_steps(trace_of((0, None, 100), (5, 9, 30 * MIB)))
    result = replay(alone, None, AllocatorSettings(expandable_segments=True, empty_cache_steps=1))
    assert (result.given_back, result.pieces) == (40 * MIB, 2)


def test_births_of_one_tick_follow_the_list():
    """The first takes the cached 20 MiB, the second finds none: 12 and 10 MiB more, or 10 and 12 less."""
    first_small = replay(trace_of((0, 1, 20 * MIB), (2, None, 10 * MIB), (2, None, 12 * MIB)))
    first_large = replay(trace_of((0, 1, 20 * MIB), (2, None, 12 * MIB), (2, None, 10 * MIB)))
    assert (first_small.peak_reserved, first_large.peak_reserved) == (32 * MIB, 30 * MIB)


def test_an_empty_trace_and_empty_tensors():
    for trace in (trace_of(), trace_of((0, 1, 0))):
        result = replay(trace, capacity=0)
        assert (result.peak_reserved, result.fits, len(result.ticks)) == (0, "yes", 0)


GROWING = trace_of((0, 1, 40 * MIB), (2, 3, 50 * MIB))


@pytest.mark.parametrize(("capacity", "fits", "retries", "failed", "missing"), [
    (None, "yes", 0, None, 0),
    (90, "yes", 0, None, 0),
    (89, "with-retries", 1, None, 0),
    (50, "with-retries", 1, None, 0),
    (44, "no", 1, 2, 6),
    (30, "no", 1, 0, 20),  # 10 at tick 0, another 10 at tick 2
])
def test_whether_a_capacity_serves(capacity, fits, retries, failed, missing):
    result = replay(GROWING, capacity and capacity * MIB)
    assert (result.fits, len(result.retries), result.failed_tick) == (fits, retries, failed)
    assert result.missing == missing * MIB
    assert result.peak_reserved == 90 * MIB  # whatever the capacity


def test_expandable_segments_serve_with_less():
    """40 MiB in two pages, then a third."""
    result = replay(GROWING, 60 * MIB, EXPANDABLE)
    assert (result.fits, result.peak_reserved) == ("yes", 60 * MIB)
    assert replay(GROWING, 59 * MIB, EXPANDABLE).missing == MIB


def test_missing_is_what_makes_it_serve():
    random = np.random.default_rng(1)
    births = np.sort(random.permutation(600)[:300])
    trace = trace_of(*((int(b), int(b + random.integers(1, 60)), int(random.integers(1, 30 * MIB))) for b in births))
    for settings in (AllocatorSettings(), EXPANDABLE):
        free = replay(trace, None, settings)
        tight = replay(trace, free.peak_allocated // 2, settings)
        assert tight.fits == "no"
        assert tight.failed_tick is not None
        assert tight.missing > 0
        assert replay(trace, free.peak_reserved, settings).fits == "yes"


def test_a_limit_is_checked_as_well():
    assert replay(GROWING, 200 * MIB, limit=90 * MIB).fits == "yes"
    assert replay(GROWING, 200 * MIB, limit=60 * MIB).fits == "with-retries"
    assert replay(GROWING, 200 * MIB, limit=48 * MIB).missing == 2 * MIB
    assert replay(GROWING, 49 * MIB, limit=60 * MIB).missing == MIB


def test_unseen_memory_of_the_allocator_comes_in_its_tick_and_stays():
    result = replay(trace_of((0, 9, 5 * MIB), (4, 9, 3 * MIB), workspaces=(6,)))
    assert result.ticks.tolist() == [0, 4, 6, 9, 9]
    assert result.allocated.tolist()[-1] == WORKSPACE
    assert result.peak_allocated == 8 * MIB + WORKSPACE
    assert result.peak_reserved == 20 * MIB  # 12 MiB of the first segment were free


def test_a_workspace_that_is_cut_from_a_large_block_keeps_it_from_the_next_step():
    """As measured on an H100: autograd's workspace lies where the logits were, and the next step's need another."""
    first, second = (1, 4, 300 * MIB), (7, 9, 300 * MIB)
    for born, reserved in ((0, 320 * MIB), (5, 600 * MIB)):
        assert replay(trace_of(first, second, workspaces=(born,))).peak_reserved == reserved


def test_the_first_step_has_all_micro_batches():
    """States, made at the end of the first step, find the cached blocks as all its micro-batches left them."""
    spans = [Span(name="step 1", start=0, stop=20, step=1), Span(name="forward", start=1, stop=4, step=1),
             Span(name="backward", start=5, stop=9, step=1), Span(name="optimizer", start=10, stop=19, step=1),
             Span(name="step 2", start=30, stop=60, step=2), Span(name="forward", start=31, stop=34, step=2),
             Span(name="backward", start=35, stop=39, step=2), Span(name="forward", start=41, stop=44, step=2),
             Span(name="backward", start=45, stop=49, step=2), Span(name="optimizer", start=50, stop=59, step=2)]
    first, states, second, further = (2, 8, 300 * MIB), (11, None, 100 * MIB), (32, 38, 300 * MIB), (42, 48, 400 * MIB)
    trace = trace_of(first, states, second, further)
    assert replay(trace).peak_reserved == 300 * MIB + 300 * MIB + 400 * MIB
    trace.spans = spans
    found = replay(trace)  # the states lie in the smaller block, and the larger one serves all that follows
    assert found.peak_reserved == 300 * MIB + 400 * MIB
    assert found.peak_allocated == 500 * MIB
    assert found.ticks.tolist() == [2, 8, 11, 32, 38, 42, 48]


def test_the_first_step_of_sweeps_is_as_it_was_traced():
    """Micro-batches that go through each block together cannot run once more behind the first step's own."""
    spans = [Span(name="step 1", start=0, stop=20, step=1), Span(name="forward", start=1, stop=4, step=1),
             Span(name="backward", start=5, stop=9, step=1), Span(name="step 2", start=30, stop=60, step=2),
             Span(name="forward", start=31, stop=34, step=2), Span(name="forward", start=35, stop=39, step=2),
             Span(name="backward", start=41, stop=44, step=2), Span(name="backward", start=45, stop=49, step=2)]
    trace = trace_of((2, 22, 300 * MIB), (36, 48, 400 * MIB))
    assert replay(trace).peak_allocated == 400 * MIB
    trace.spans = spans
    assert replay(trace).peak_allocated == 400 * MIB


def global_batch(seed: int, micro_batches: int, layers: int = 4) -> Trace:
    """Two steps of a model whose layers keep activations and add up gradients, of random sizes."""
    random = np.random.default_rng(seed)
    weights = random.integers(1, 30 * MIB, 4).tolist()
    kept = random.integers(1, 40 * MIB, 6).tolist()
    found: list[Allocation] = []

    def new(size: int) -> Allocation:
        found.append(Allocation(len(ticks), None, size))
        ticks.append(0)
        return found[-1]

    def drop(allocation: Allocation) -> None:
        allocation.died = len(ticks)
        ticks.append(0)

    ticks: list[int] = []
    for _ in range(layers):
        for size in weights:
            new(size)
    for step in range(2):
        gradients: list[Allocation] = []
        for number in range(micro_batches):
            held = []
            for _ in range(layers):
                for size in kept:
                    temporary = new(size // 2 + 1)
                    held.append(new(size))
                    drop(temporary)
            gradient = new(kept[-1])
            for activation in reversed(held):
                following = new(activation.bytes)
                drop(gradient)
                drop(activation)
                gradient = following
            drop(gradient)
            for size in weights * layers:
                added = new(size)
                if number == 0:
                    gradients.append(added)
                else:
                    drop(added)
        if step == 0:
            for gradient in list(gradients):
                new(2 * gradient.bytes)
        for gradient in gradients:
            drop(gradient)
    return Trace(origin="predicted", allocations=found)


@pytest.mark.parametrize("settings", [AllocatorSettings(), EXPANDABLE], ids=["segments", "expandable"])
@pytest.mark.parametrize("seed", range(5))
def test_one_middle_micro_batch_stands_for_many(seed: int, settings: AllocatorSettings):
    once, often = (replay(global_batch(seed, micro_batches), None, settings) for micro_batches in (3, 8))
    assert once.peak_allocated == often.peak_allocated
    assert once.peak_reserved == often.peak_reserved

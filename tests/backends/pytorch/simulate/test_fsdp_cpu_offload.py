"""FSDP's parts in the host's memory, as planned for GPUs: what lies where, what is copied, what the host does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plain import PLAIN
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.devices import find_device
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.trace import Category, Phase, Place, Stream, Trace

CARD = replace(find_device("rtx-3090"), cards=2)
PARTS = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)


def predicted(tiny, **parallel) -> Trace:
    """Two micro-batches of 2 for each of two processes."""
    values = {**tiny, **PLAIN, "batch_size": 8, "micro_batch_size": 2, "precision": "bf16",
              "parallel": {"name": "fsdp", "processes": 2, **parallel}}  # fmt: skip
    return PytorchBackend().predict(resolve(Recipe.from_dict(values), CARD), CARD)


@pytest.fixture
def both(tiny) -> tuple[Trace, Trace]:
    return predicted(tiny), predicted(tiny, cpu_offload=True)


def held(trace: Trace, place: Place) -> dict[Category, int]:
    """Bytes as the second update begins."""
    update = next(span for span in trace.spans if span.name == "optimizer" and span.step == 2)
    return trace.by_category(update.start, place)


def test_parts_lie_in_the_hosts_memory(both):
    plain, offloaded = both
    there = held(offloaded, Place.HOST)
    assert {category: there[category] for category in PARTS} == {
        category: held(plain, Place.DEVICE)[category] for category in PARTS}  # fmt: skip
    assert all(held(offloaded, Place.DEVICE)[category] == 0 for category in PARTS)
    assert offloaded.peak()[1] < plain.peak()[1]


def test_what_is_gathered_is_copied_first_and_sums_come_back(both):
    plain, offloaded = both
    ops = [op for op, _ in offloaded.step_ops()]
    gathers = [op for op, _ in plain.step_ops() if "_allgather_base_" in op.name]
    sums = [op for op, _ in plain.step_ops() if "_reduce_scatter_base_" in op.name]
    copied = {stream: [op.bytes_read for op in ops if op.stream is stream]
              for stream in (Stream.COPY_IN, Stream.COPY_OUT)}  # fmt: skip
    # a process sends its own part to the other one, blocks in bf16
    assert copied[Stream.COPY_IN] == [op.bytes_read * (2 if op.dtype == "bfloat16" else 1) for op in gathers]
    assert copied[Stream.COPY_OUT] == [op.bytes_read for op in sums]
    place = {op.tick: op for op in ops}
    for op in ops:
        if "all_gather_copy_in" in op.name:
            assert Stream.COPY_IN in {place[tick].stream for tick in op.after if tick in place}


def test_the_host_updates(both):
    _, offloaded = both
    ops = [op for op, _ in offloaded.step_ops()]
    assert {op.stream for op in ops if op.phase is Phase.OPTIMIZER} <= {Stream.HOST, Stream.NETWORK}
    first = next(op for op in ops if op.phase is Phase.OPTIMIZER)
    last = max(op.tick for op in ops if op.stream is Stream.COPY_OUT)
    waited = {tick for op in ops if op.stream is Stream.HOST and op.tick <= first.tick for tick in op.after}
    assert last in waited

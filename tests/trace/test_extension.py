"""Two shallow traces give the trace of a deep model: the same events, bytes and FLOPs as tracing it whole."""

from __future__ import annotations

from itertools import count

import pytest

from tests.architectures import TASK_OF, tiny_model
from tests.plain import CPU, PLAIN
from tightfit import Recipe
from tightfit.backends.pytorch.simulate import predict as prediction
from tightfit.devices import Device, find_device
from tightfit.trace import Allocation, Category, Op, OpClass, Phase, Place, Span, Stream, Trace
from tightfit.trace.events import Reader, Stack
from tightfit.trace.extension import extend

DEEP = 7


def recipe(name: str, **fields) -> Recipe:
    return Recipe.from_dict({
        **PLAIN, "task": TASK_OF[name], "batch_size": 8, "micro_batch_size": 2, "seq_len": 16,
        "data": {"source": "dummy"}, "vocab_size": None if name == "vit" else 96, **fields,
    })


def traced(name: str, depth: dict[str, int], device: Device = CPU, **fields) -> Trace:
    return prediction.predict(recipe(name, **fields), device, tiny_model(name, **depth), whole=True)


def described(trace: Trace, stacks: list[Stack]) -> list[object]:
    """A trace without its ticks, which count differently where unlike things happen between events."""
    events = [event for _, event in Reader(trace, stacks).events]
    allocations = [(a.op, a.module, a.bytes, a.category, a.dtype) for a in trace.allocations]
    # Not the launches of a fused op, which go by thousands of bytes and are not in proportion to the depth.
    ops = [(o.name, o.module, o.phase, o.op_class, o.flops, o.bytes_read, o.bytes_written) for o in trace.ops]
    return [events, allocations, ops, [(s.name, s.step, s.times) for s in trace.spans]]


LAYERS = ("num_hidden_layers",)
CASES = [
    ("llama", LAYERS, ["model.layers"], {"precision": "bf16", "checkpointing": "every-block"}, "h100-sxm"),
    ("gpt2", ("n_layer",), ["transformer.h"], {"optimizer": {"name": "adamw", "implementation": "loop"}}, None),
    ("gpt2", ("n_layer",), ["transformer.h"], {"precision": "fp16", "checkpointing": "selective"}, "v100-16gb"),
    ("bert", LAYERS, ["bert.encoder.layer"], {}, None),
    ("bart", ("encoder_layers", "decoder_layers"), ["model.encoder.layers", "model.decoder.layers"], {}, None),
    ("vit", LAYERS, ["vit.layers"], {"optimizer": "sgd"}, "a10"),
]


@pytest.mark.parametrize(("name", "fields", "paths", "changes", "gpu"), CASES, ids=lambda v: str(v)[:24])
def test_an_extended_trace_is_the_whole_one(name, fields, paths, changes, gpu):
    device = CPU if gpu is None else find_device(gpu)
    shallow, deeper, whole = (
        traced(name, dict.fromkeys(fields, depth), device, **changes) for depth in (4, 5, DEEP)
    )
    stacks = [Stack(path=path, period=1, template=2) for path in paths]
    extended = extend(shallow, deeper, stacks, DEEP - 4)
    assert extended is not None
    assert described(extended, stacks) == described(whole, stacks)
    assert extended.peak()[1] == whole.peak()[1]


def test_traces_that_differ_in_more_than_depth_give_nothing():
    shallow = traced("llama", {"num_hidden_layers": 4})
    wider = traced("llama", {"num_hidden_layers": 5, "intermediate_size": 64})
    assert extend(shallow, wider, [Stack(path="model.layers", period=1, template=2)], 4) is None


def test_a_deep_model_is_predicted_from_few_blocks_and_alike(monkeypatch):
    asked = recipe("llama")
    model = tiny_model("llama", num_hidden_layers=12)
    whole = prediction.predict(asked, CPU, model, whole=True)
    traces: list[int] = []
    original = prediction._traced

    def counted(*args, **options):
        trace = original(*args, **options)
        traces.append(len(trace.ops))
        return trace

    monkeypatch.setattr(prediction, "_traced", counted)
    quick = prediction.predict(asked, CPU, model)
    assert len(traces) == 2
    assert max(traces) < len(whole.ops) / 2
    assert described(quick, []) == described(whole, [])


@pytest.mark.cold
def test_blocks_that_alternate_are_copied_in_their_period():
    asked = recipe("llama", checkpointing={"name": "every-nth", "n": 2})
    model = tiny_model("llama", num_hidden_layers=21)
    whole = prediction.predict(asked, CPU, model, whole=True)
    quick = prediction.predict(asked, CPU, model)
    assert quick.peak()[1] == whole.peak()[1]
    assert len(quick.ops) == len(whole.ops)


def streamed(depth: int) -> Trace:
    """Blocks whose weights lie in the host: each copies the next one's in, into the memory of the one before it, and
    copies something out, for all of which a last op waits."""
    trace = Trace(origin="predicted", spans=[])
    ticks = count(1)

    def run(name, module, stream, *after):
        op = Op(name=name, tick=next(ticks), phase=Phase.FORWARD, op_class=OpClass.OTHER, bytes_read=8, module=module,
                stream=stream, after=after)
        trace.ops.append(op)
        return op.tick

    paths = [f"model.layers.{block}" for block in range(depth)]
    for path in paths:
        trace.allocations.append(Allocation(born=next(ticks), died=None, bytes=16, module=path, place=Place.HOST,
                                            pinned=True, category=Category.WEIGHTS))
    start = next(ticks)
    loaded, computed, stored = run("load", "", Stream.COPY_IN), None, []
    for path in paths:
        ready = loaded
        if path != paths[-1]:
            loaded = run("load", path, Stream.COPY_IN, *([] if computed is None else [computed]))
        computed = run("compute", path, Stream.COMPUTE, ready)
        stored.append(run("store", path, Stream.COPY_OUT, computed))
    run("norm", "", Stream.COMPUTE, *stored)
    trace.spans.append(Span(name="step 1", start=start, stop=next(ticks), step=1))
    return trace


def test_places_streams_and_what_ops_wait_for_are_extended_too():
    extended = extend(streamed(6), streamed(7), [Stack(path="model.layers", period=1, template=2)], 5)
    assert extended is not None
    whole = streamed(11)
    assert [(op.name, op.module, op.stream) for op in extended.ops] == [
        (op.name, op.module, op.stream) for op in whole.ops]
    order, true_order = ({op.tick: number for number, op in enumerate(t.ops)} for t in (extended, whole))
    assert [{order[tick] for tick in op.after} for op in extended.ops] == [
        {true_order[tick] for tick in op.after} for op in whole.ops]
    assert [(a.module, a.place, a.pinned) for a in extended.allocations] == [
        (a.module, a.place, a.pinned) for a in whole.allocations]


def test_what_reaches_further_than_a_neighbour_is_not_extended():
    def chained(depth):
        trace = streamed(depth)
        computes = [op for op in trace.ops if op.name == "compute"]
        for block, op in enumerate(computes[3:]):
            op.after += (computes[block].tick,)
        return trace

    assert extend(chained(6), chained(7), [Stack(path="model.layers", period=1, template=2)], 5) is None

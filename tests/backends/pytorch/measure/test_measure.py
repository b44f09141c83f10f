"""A measured step against figures got otherwise: the allocator's events, FLOPs as torch counts them, the wall clock."""

from __future__ import annotations

import gc
import gzip
import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._C._profiler import _EventType
from torch.utils.flop_counter import FlopCounterMode

from tests.allocations import allocated
from tests.architectures import TASK_OF, tiny_model
from tests.benchmark_modules import benchmark
from tightfit.backends.measuring import measure
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.measure import step_profiler
from tightfit.backends.pytorch.measure.events import COMPILED_CODE, measured_lanes, measured_trace, read
from tightfit.backends.pytorch.measure.marks import Call
from tightfit.backends.pytorch.measure.step_profiler import StepProfiler, _export
from tightfit.devices import Device
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.trace import WALL_PHASES, Allocation, Category, Op, OpClass, Phase, Place, Stream

pytestmark = pytest.mark.usefixtures("few_objects")

CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 40)
BACKEND = PytorchBackend()


def prepared(name, **fields):
    """The step of a tiny model, and its global batches without end."""
    recipe = Recipe.from_dict({
        "model": "gpt2", "task": TASK_OF[name], "data": "dummy", "seq_len": 16, "batch_size": 6, "micro_batch_size": 3,
        "device": "cpu", **fields,
    })
    build = BACKEND.build(resolve(recipe, CPU), CPU, tiny_model(name))
    random_global_batch = benchmark("random_global_batches").random_global_batch
    return BACKEND.step(build), (random_global_batch(build.recipe, build.task, build.facts, seed) for seed in count())


def held(step):
    """Bytes of weights, buffers and optimizer states, shared ones once."""
    states = [v for s in step.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    tensors = [*step.build.model.parameters(), *step.build.model.buffers(), *states]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def allocators_peak(step, global_batch):
    """The most that a plain step has allocated at once, by the running sum of the profiler's events."""
    before = held(step)
    gc.collect()
    gc.disable()
    try:
        with step.build.process_settings():
            return before + max(allocated(lambda: step(global_batch, 1e-4).read()))
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "bert", "t5", "vit"])
def test_peak_flops_and_phases_are_those_got_otherwise(name):
    step, global_batches = prepared(name, attention="eager")  # torch does not count the CPU's own attention kernel
    measured = measure(BACKEND, step, global_batches)
    trace = measured.trace
    own = allocators_peak(step, next(global_batches))
    assert measured.peak_bytes == trace.peak()[1] == pytest.approx(own, rel=0.002)
    with FlopCounterMode(display=False) as counter, step.build.process_settings():
        step(next(global_batches), 1e-4).read()
    assert sum(op.flops for op in trace.ops) == counter.get_total_flops() > 0
    assert sum(measured.phase_seconds.values()) == pytest.approx(measured.step_seconds, rel=0.02, abs=1e-3)
    assert sum(span.seconds for span in trace.spans[1:]) <= trace.spans[0].seconds
    assert {span.name for span in trace.spans} == {"step 1", "forward", "backward", "optimizer"}


def test_every_op_has_its_seconds_phase_and_module():
    step, global_batches = prepared("gpt2", checkpointing="every-block")
    ops = measure(BACKEND, step, global_batches).trace.ops
    assert all(op.seconds is not None and op.seconds > 0 for op in ops)
    assert {op.phase for op in ops} >= {Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER}
    products = [op for op in ops if op.op_class is OpClass.CONTRACTION and op.phase is Phase.BACKWARD]
    assert products
    assert all("transformer.h." in op.module or op.module in ("lm_head", "transformer.wte") for op in products)
    assert [op.tick for op in ops] == sorted(op.tick for op in ops)


@pytest.mark.parametrize("fields", [
    {}, {"precision": "bf16", "checkpointing": "every-block"}, {"optimizer": "adamw-8bit"},
    {"optimizer": {"name": "adamw", "implementation": "foreach"}},
], ids=str)  # fmt: skip
def test_memory_is_told_apart_as_in_the_prediction(fields):
    step, global_batches = prepared("gpt2", **fields)
    found = measure(BACKEND, step, global_batches).trace
    predicted = BACKEND.predict(step.build.recipe, CPU, tiny_model("gpt2"))
    second = predicted.span("step 2")
    tick, peak = found.peak()
    expected_tick, expected = predicted.peak(second.start, second.stop)
    assert peak == pytest.approx(expected, rel=0.002)
    ours, theirs = found.by_category(tick), predicted.by_category(expected_tick)
    for category in (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER):
        assert ours[category] == theirs[category] > 0
    assert ours[Category.ACTIVATIONS] == pytest.approx(theirs[Category.ACTIVATIONS], rel=0.02)


@pytest.mark.cold
def test_compiled_code_is_measured_with_its_memory_and_gradients():
    step, global_batches = prepared("gpt2", compile="per-block")
    found = measure(BACKEND, step, global_batches).trace
    compiled = [op for op in found.ops if op.name == COMPILED_CODE]
    assert {op.phase for op in compiled} == {Phase.FORWARD, Phase.BACKWARD}
    assert len(compiled) == 2 * 2 * 3  # passes, micro-batches, two blocks and the loss
    backward = [span for span in found.spans if span.name == "backward"][-1]
    weights = found.by_category(0)[Category.WEIGHTS]
    trained = sum(p.untyped_storage().nbytes() for p in step.build.model.parameters() if p.requires_grad)
    assert found.by_category(backward.stop - 1)[Category.GRADIENTS] == trained <= weights


def test_measuring_leaves_the_step_as_it_was_and_goes_on_training():
    step, global_batches = prepared("gpt2")
    measured = measure(BACKEND, step, global_batches)
    assert step.watch is None
    assert step.steps == 8
    assert measured.overhead > 0
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in step.build.model.modules())


def test_a_step_that_fails_while_the_allocator_records_it_is_followed_without(monkeypatch):
    step, global_batches = prepared("gpt2", checkpointing="every-block")
    profiler, following = BACKEND.step_profiler(step), StepProfiler._following

    def unless_recorded(self, found, recording):
        if recording:
            raise SystemError("returned NULL")
        monkeypatch.setattr(self, "_cuda", False)
        return following(self, found, recording)

    with profiler.timed():
        step(next(global_batches), 1e-3)
    monkeypatch.setattr(StepProfiler, "_following", unless_recorded)
    monkeypatch.setattr(profiler, "_cuda", True)
    profiler.profiled(next(global_batches), 1e-3)
    found = profiler.measurement()
    assert found.memory_record is None
    assert found.trace.ops
    assert "no memory.pickle: with the allocator's record, SystemError: returned NULL" in found.trace.notes


def test_a_profilers_trace_is_whole_or_not_there(tmp_path):
    path = tmp_path / "trace.json.gz"

    class Profiler:
        def export_chrome_trace(self, where):
            Path(where).write_text('{"traceEvents": []}')

    _export(Profiler(), path)
    assert json.loads(gzip.decompress(path.read_bytes())) == {"traceEvents": []}

    class Full(Profiler):  # what torch's own does on a full disk: no error, and a part under another name
        def export_chrome_trace(self, where):
            Path(f"{where}.tmp").write_text('{"traceEv')

    with pytest.raises(OSError, match="disk full") as caught:
        _export(Full(), path)
    assert caught.value.filename == str(path)
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json.gz"]
    assert json.loads(gzip.decompress(path.read_bytes())) == {"traceEvents": []}


def test_a_steps_own_peak_outlives_a_measured_one(monkeypatch):
    peaks = [700, 300, 300]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks.pop(0))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    step, _ = prepared("gpt2")
    monkeypatch.setattr(step, "build", SimpleNamespace(torch_device=torch.device("cuda")))
    step.restart_peak()
    assert step.peak_memory() == 700


class Kineto:
    """Events in the shape of kineto's results on CUDA; made by hand, for there is no such device here."""

    def __init__(self, tree, flat):
        self._tree, self._flat = tree, flat

    def experimental_event_tree(self):
        return self._tree

    def events(self):
        return self._flat


def node(name, start, length, *children, tag=_EventType.TorchOp):
    return SimpleNamespace(name=name, start_time_ns=start, duration_time_ns=length, children=children,
                           extra_fields=None, tag=tag)


def memory(start, address, size, device="cuda"):
    detail = SimpleNamespace(ptr=address, alloc_size=size, device=torch.device(device))
    return SimpleNamespace(name="[memory]", start_time_ns=start, duration_time_ns=0, children=(), extra_fields=detail,
                           tag=_EventType.Allocation)


def flat(name, start, length, link, device="CPU", annotation=False):
    return SimpleNamespace(name=lambda: name, start_ns=lambda: start, end_ns=lambda: start + length,
                           correlation_id=lambda: link, device_type=lambda: SimpleNamespace(name=device),
                           is_user_annotation=lambda: annotation)


def test_kernels_count_for_the_op_that_launched_them_and_others_stand_alone():
    marks = SimpleNamespace(
        calls=[Call(tick=1, module="h.0", name="aten.mm",
                    op=Op(name="aten.mm", tick=1, phase=Phase.FORWARD, op_class=OpClass.CONTRACTION, module="h.0"))],
        phases=[Phase.FORWARD], gradients=[], held={}, held_elsewhere=7, allocations=[],
    )
    tree = [node("tightfit-mark:phase:0", 1000, 900, node("tightfit-mark:op:0", 1100, 50)),
            node("tightfit-mark:op:0", 3000, 300, tag=_EventType.Kineto)]  # the same op's line of the GPU's time
    events = [
        flat("cudaLaunchKernel", 1110, 5, 41), flat("cudaLaunchKernel", 1120, 5, 42),
        flat("cuLaunchKernel", 1500, 5, 43), flat("cudaMemcpyAsync", 1600, 5, 44),
        flat("sm90_gemm", 3000, 200, 41, "CUDA"), flat("splitk_reduce", 3200, 100, 42, "CUDA"),
        flat("triton_poi_fused_add", 3300, 40, 43, "CUDA"), flat("Memcpy DtoH", 3400, 10, 44, "CUDA"),
        flat("tightfit-mark:phase:0", 3000, 400, 0, "CUDA", annotation=True),
    ]
    trace = measured_trace(marks, read(Kineto(tree, events), "cuda"), "cuda")
    assert [(op.name, op.op_class, op.tick, op.phase) for op in trace.ops] == [
        ("aten.mm", OpClass.CONTRACTION, 100, Phase.FORWARD),
        ("triton_poi_fused_add", OpClass.ELEMENTWISE, 500, Phase.FORWARD),
        ("Memcpy DtoH", OpClass.MOVEMENT, 600, Phase.FORWARD),
    ]
    assert [op.seconds for op in trace.ops] == pytest.approx([300e-9, 40e-9, 10e-9])
    assert trace.by_category(0)[Category.OTHER] == 7


def test_lanes_are_when_kernels_and_copies_ran():
    marks = SimpleNamespace(phases=[Phase.FORWARD, Phase.BACKWARD])
    tree = [node("tightfit-mark:phase:0", 1000, 900), node("tightfit-mark:phase:1", 2000, 900)]
    events = [
        flat("cudaLaunchKernel", 1110, 5, 41), flat("cudaMemcpyAsync", 1600, 5, 42),
        flat("cudaMemcpyAsync", 2600, 5, 43),
        flat("sm90_gemm", 3000, 200, 41, "CUDA"), flat("Memcpy HtoD (Pinned -> Device)", 2000, 1500, 42, "CUDA"),
        flat("Memcpy DtoH (Device -> Pinned)", 3400, 100, 43, "CUDA"),
    ]
    found = measured_lanes(marks, read(Kineto(tree, events), "cuda"))
    assert [(s.stream, s.phase, round(s.begin * 1e9), round(s.end * 1e9)) for s in found] == [
        (Stream.COMPUTE, Phase.FORWARD, 2000, 2200), (Stream.COPY_IN, Phase.FORWARD, 1000, 2500),
        (Stream.COPY_OUT, Phase.BACKWARD, 2400, 2500),
    ]
    assert measured_lanes(marks, read(Kineto(tree, []), "cpu")) == ()


def test_a_gpus_memory_is_told_apart_by_op_and_address():
    weight = Allocation(born=0, died=None, bytes=40, category=Category.WEIGHTS, module="h.0")
    made = Allocation(born=1, died=None, bytes=80, category=Category.ACTIVATIONS, category_since=1, module="h.0",
                      op="aten.mm")
    kept = Allocation(born=1, died=None, bytes=24, op="aten.empty", place=Place.HOST, pinned=True)
    marks = SimpleNamespace(
        calls=[Call(tick=1, module="h.0", name="aten.mm", made={800: made})],
        phases=[Phase.FORWARD, Phase.BACKWARD], gradients=[(640, "h.0")], held={4: weight}, held_elsewhere=0,
        allocations=[weight, made, kept],
    )
    inside = (memory(1100, 800, 80), memory(1110, 900, 16), memory(1115, 7, 5, "cpu"), memory(1120, 900, -16))
    tree = [node("tightfit-mark:phase:0", 1000, 900, node("tightfit-mark:op:0", 1100, 50, *inside)),
            node("tightfit-mark:phase:1", 2000, 900,
                 node("## Call CompiledFxGraph x ##", 2100, 200, memory(2150, 640, 40), memory(2160, 800, -80)),
                 node("tightfit-mark:grad:0", 2500, 1))]
    trace = measured_trace(marks, read(Kineto(tree, []), "cuda"), "cuda")
    found = [(a.bytes, a.category, a.born, a.category_since, a.died, a.op) for a in trace.allocations]
    assert found == [
        (40, Category.WEIGHTS, 0, 0, None, ""),
        (80, Category.ACTIVATIONS, 100, 100, 1160, "aten.mm"),
        (16, Category.TEMPORARY, 110, 0, 120, "aten.mm"),
        (40, Category.GRADIENTS, 1150, 1500, None, COMPILED_CODE),
        (24, Category.TEMPORARY, 100, 0, None, "aten.empty"),  # the host's, which the device's events have not
    ]
    assert trace.peak()[1] == 160
    assert trace.peak(place=Place.HOST)[1] == 24


@pytest.mark.parametrize("update", ["in-backward", "with-forward", "after-backward"])
def test_updates_block_by_block_count_as_updates(update, monkeypatch):
    """The clock stands still but for the optimizer's own steps."""
    step, global_batches = prepared("gpt2", accumulation="by-block", update=update, max_grad_norm=0)
    updates = []
    step.optimizer.register_step_post_hook(lambda *_: updates.append(0))
    monkeypatch.setattr(step_profiler.time, "perf_counter", lambda: float(len(updates)))
    found = measure(BACKEND, step, global_batches)

    assert found.phase_seconds == {**dict.fromkeys(WALL_PHASES, 0.0), Phase.OPTIMIZER: found.step_seconds}
    assert found.step_seconds == len(step.blocks.parts.modules)
    updated = {op.phase for op in found.trace.ops if "adam" in op.name}
    assert updated == {Phase.OPTIMIZER}

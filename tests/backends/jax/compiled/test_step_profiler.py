"""Steps of a tiny scanned model that recomputes its layers, measured for real on this machine."""

from __future__ import annotations

import jax
import pytest
from jax.profiler import ProfileData

from tests.backends.jax.cases import build, fast_options
from tightfit.backends.jax import assembly
from tightfit.backends.jax.compiled.step_profiler import StepProfiler
from tightfit.backends.jax.step import Step
from tightfit.data import prepare
from tightfit.data.loading import GlobalBatchLoader
from tightfit.errors import ReportError
from tightfit.model_facts import model_facts
from tightfit.trace import WALL_PHASES, Category, OpClass, Phase

FOLLOWED = 6
"""The step that is."""


@pytest.fixture(scope="module")
def made(compiled_programs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "compiler_options", lambda flags, devices: fast_options())
        yield build(checkpointing="every-block", attention="eager", model_overrides={"dropout_rate": 0.1})


def global_batches(step, first=0, last=12):
    recipe = step.build.recipe
    data = prepare(recipe, model_facts(recipe))
    return step.global_batches(GlobalBatchLoader(data.train, recipe), first, last)


@pytest.fixture(scope="module")
def plain(made):
    """A step that is not measured, which leaves its program in JAX's cache, and its losses."""
    step = Step(made)
    return step, [step(global_batch, 1e-3).read().loss.mean for global_batch in global_batches(step, 0, 9)]


@pytest.fixture(scope="module")
def followed(made, plain):
    """A step's measurement, and the losses of the steps around it."""
    step = Step(made)
    profiler, losses = StepProfiler(step), []
    for number, global_batch in enumerate(global_batches(step, 0, 9), start=1):
        if number == FOLLOWED:
            losses.append(profiler.profiled(global_batch, 1e-3).read().loss.mean)
        else:
            with profiler.timed():
                losses.append(step(global_batch, 1e-3).read().loss.mean)
    return profiler.measurement(), losses


@pytest.fixture(scope="module")
def measured(followed):
    return followed[0]


def test_the_peak_is_what_xla_planned_for_the_very_step(measured, plain):
    assert measured.peak_bytes == measured.trace.peak()[1] == plain[0].planned_memory()


def test_every_instruction_is_timed_and_has_its_place_in_the_model(measured):
    trace = measured.trace
    assert trace.notes == []
    assert {op.op_class for op in trace.ops} <= set(OpClass) - {OpClass.OTHER}
    seconds = {}
    for op in trace.ops:
        seconds[op.module, op.phase] = seconds.get((op.module, op.phase), 0.0) + op.seconds
    for phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD):
        assert seconds["layers.mlp", phase] > 0
    assert seconds["layers.attention.softmax", Phase.FORWARD] > 0
    assert seconds["optimizer", Phase.OPTIMIZER] > 0
    assert seconds["optimizer.clip", Phase.OPTIMIZER] > 0
    assert seconds["accumulation", Phase.BACKWARD] > 0
    assert any("dynamic-update-slice" in op.name and op.seconds > 0 for op in trace.ops)


def test_the_largest_arrays_are_known(measured):
    alive = measured.trace.alive(measured.trace.peak()[0])
    stacked = [a for a in alive if a.shape == (3, 2, 8, 16) and "dynamic-update-slice" in a.op]
    assert stacked
    assert all(a.module.startswith("layers") for a in stacked)
    weights = {a.module for a in alive if a.category is Category.WEIGHTS}
    assert {"embed.weight", "layers.*.attn.qkv.weight"} <= weights


def test_a_plain_steps_seconds_are_shared_out_among_its_passes(measured):
    assert set(measured.phase_seconds) == set(WALL_PHASES)
    assert sum(measured.phase_seconds.values()) == pytest.approx(measured.step_seconds)
    assert all(seconds > 0 for seconds in measured.phase_seconds.values())


def test_ticks_are_nanoseconds_of_the_programs_order(measured):
    trace = measured.trace
    step = trace.span("step 1")
    busy = sum(op.seconds for op in trace.ops)
    assert step.seconds == pytest.approx(busy, abs=1e-5)
    inside = [span for span in trace.spans if span is not step]
    assert sum(span.stop - span.start for span in inside) <= step.stop - step.start
    assert {span.name for span in inside} == {"forward", "backward", "optimizer"}
    assert all(a.died is None or a.born < a.died <= step.stop for a in trace.allocations)


def test_the_step_is_annotated_for_xprof(measured):
    found = [dict(event.stats) for plane in ProfileData.from_serialized_xspace(measured.xplane).planes
             for line in plane.lines for event in line.events if event.name == "step"]  # fmt: skip
    assert [stats["step_num"] for stats in found] == [FOLLOWED]


def test_xprof_reads_it(measured, tmp_path):
    tools = pytest.importorskip("xprof.convert.raw_to_tool_data")
    (tmp_path / "local.xplane.pb").write_bytes(measured.xplane)
    events, _ = tools.xspace_to_tool_data([str(tmp_path / "local.xplane.pb")], "trace_viewer", {})
    assert "jit_step" in events


def test_a_measured_step_learns_what_it_would_without(followed, plain):
    assert followed[1] == plain[1]


def test_on_a_card_the_followed_step_is_compiled_by_itself(made, plain, monkeypatch):
    """As CUDA graphs ask for; here on a processor, whose files are then not the ones that are looked for."""
    step = Step(made)
    profiler = StepProfiler(step)
    monkeypatch.setattr(profiler, "_platform", "gpu")
    losses = []
    for number, global_batch in enumerate(global_batches(step, 0, 3)):
        with profiler.timed():
            run = profiler.profiled if number == 1 else step
            losses.append(run(global_batch, 1e-3).read().loss.mean)
    assert losses == plain[1][:3]
    assert len(step._compiled) == 1
    with pytest.raises(ReportError, match=r"could not be followed: XLA wrote no \*.jit_step.\*gpu_after"):
        profiler.measurement()


def test_where_the_followed_step_cannot_be_compiled_the_plain_one_is_taken(plain, monkeypatch):
    step = plain[0]
    profiler = StepProfiler(step)
    monkeypatch.setattr(step, "compile_with_dump", lambda *given: (_ for _ in ()).throw(RuntimeError("no such option")))
    assert profiler.profiled(next(global_batches(step)), 1e-3).read().loss.count == 32
    with pytest.raises(ReportError, match="could not be followed: no such option"):
        profiler.measurement()


def test_where_another_profile_is_under_way_the_step_is_taken_all_the_same(plain, tmp_path):
    step = plain[0]
    profiler = StepProfiler(step)
    quiet = jax.profiler.ProfileOptions()
    quiet.python_tracer_level = 0
    jax.profiler.start_trace(tmp_path, profiler_options=quiet)
    try:
        assert profiler.profiled(next(global_batches(step)), 1e-3).read().loss.count == 32
    finally:
        jax.profiler.stop_trace()
    with pytest.raises(ReportError, match=r"could not be followed: .*one profile"):
        profiler.measurement()

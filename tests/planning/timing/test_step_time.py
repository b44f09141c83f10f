"""The time of a step: the two clocks of host and device against hand-run cases, and its data."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from tests.planning.ops import CPU, GPU, MEASURED, RATE, add, mm
from tightfit.planning.defaults import resolve
from tightfit.planning.timing import step_time as timing
from tightfit.planning.timing.link import LINK_SHARE, PAGEABLE_SHARE
from tightfit.planning.timing.op_times import KERNEL_START, op_seconds
from tightfit.planning.timing.step_time import CALL_SECONDS, HOST_SECONDS, step_time
from tightfit.planning.timing.streams import QUEUED
from tightfit.planning.timing.uncertainty import HOST_ERROR, Work
from tightfit.recipe import Recipe
from tightfit.trace import OpClass, Phase, Span, Trace

FORWARD, BACKWARD = HOST_SECONDS["forward"], HOST_SECONDS["backward"]


def recipe(device=GPU, **changes):
    values = {"model": "gpt2", "data": "dummy", "seq_len": 8, "batch_size": 1, "micro_batch_size": 1}
    return resolve(Recipe.from_dict({**values, **changes}), device)


def trace(ops, repeated=None):
    """One step of those ops; `repeated`: how often the first so many of them run in a row, as (number, times)."""
    ops = [replace(op, tick=tick) for tick, op in zip(count(2), ops, strict=False)]
    spans = [Span(name="step 2", start=1, stop=len(ops) + 2, step=2)]
    if repeated is not None:
        spans.append(Span(name="micro-batch", start=2, stop=2 + repeated[0], step=2, times=repeated[1]))
    return Trace(origin="predicted", ops=ops, spans=spans)


def device_seconds(op, device=GPU):
    return op_seconds(op, device)


# The two clocks


def test_a_step_of_large_ops_takes_what_the_device_takes():
    ops = [add(10**10), mm(8192, 8192, 8192, phase=Phase.BACKWARD), add(10**10, Phase.OPTIMIZER)]
    found = step_time(trace(ops), recipe(), GPU)
    assert found.seconds - found.data == pytest.approx(sum(map(device_seconds, ops)))
    assert (found.forward, found.backward) == pytest.approx(tuple(map(device_seconds, ops[:2])))
    assert not found.calibrated


def test_a_steps_seconds_are_told_apart_by_what_they_go_to():
    ops = [add(10**10), mm(8192, 8192, 8192), add(10**9, Phase.OPTIMIZER), *[add()] * 5000]
    found = step_time(trace(ops, repeated=(2, 3)), recipe(), GPU)
    assert sum(found.work.values()) == pytest.approx(found.seconds - found.data)
    assert found.work[Work.TENSOR_CORES] == pytest.approx(3 * device_seconds(ops[1]))
    assert found.work[Work.HOST] > 0


def test_a_step_of_small_ops_takes_what_the_host_takes():
    ops = [add()] * 500 + [add(phase=Phase.BACKWARD)] * 300
    found = step_time(trace(ops), recipe(), GPU)
    prepared = found.seconds - 500 * FORWARD - 300 * BACKWARD  # the global batch, which the host prepares or waits for
    assert -1e-9 < prepared < 3e-5
    assert any("waits for the host" in note for note in found.notes)


def test_the_host_runs_ahead_while_the_device_works():
    """One op of 0.01 s hides the issuing of 400 small ones, 0.008 s, that come after it."""
    large, small = add(8_500_000_000), add(0)
    found = step_time(trace([large] + [small] * 400), recipe(), GPU)
    assert found.seconds - found.data == pytest.approx(device_seconds(large) + 400 * device_seconds(small))
    late = step_time(trace([small] * 400 + [large]), recipe(), GPU)
    assert late.seconds == pytest.approx(found.seconds)  # in the step before, it hides them as well


def test_the_host_runs_no_further_ahead_than_the_queue_is_long():
    large, small = add(850_000_000_000), add(0)  # 1 s
    short = step_time(trace([large] + [small] * (QUEUED - 1)), recipe(), GPU)
    long = step_time(trace([large] + [small] * 4 * QUEUED), recipe(), GPU)
    issued_late, in_store = 3 * QUEUED + 1, (QUEUED - 1) * KERNEL_START
    idle = issued_late * (FORWARD - KERNEL_START) - in_store
    busy = device_seconds(large) + 4 * QUEUED * device_seconds(small)
    assert short.seconds - short.data == pytest.approx(device_seconds(large) + (QUEUED - 1) * device_seconds(small))
    assert long.seconds - long.data == pytest.approx(busy + idle, rel=0.001)


def test_reading_a_value_makes_the_host_wait():
    ops = [add(8_500_000_000)] + [add(0)] * 300
    read = add(4, name="aten._local_scalar_dense.default", op_class=OpClass.MOVEMENT)
    free, waited = (step_time(trace(o), recipe(), GPU) for o in (ops, [ops[0], read, *ops[1:]]))
    assert waited.seconds > free.seconds + 250 * (FORWARD - KERNEL_START)


def test_loss_scaling_waits_unless_the_optimizer_is_fused():
    check = add(4, Phase.OPTIMIZER, name="aten._amp_foreach_non_finite_check_and_unscale_.default")

    def seconds(update):
        steps = [replace(add(0, Phase.OPTIMIZER), name=update)] * 300
        return step_time(trace([add(8_500_000_000), check, *steps]), recipe(), GPU).seconds

    assert seconds("aten.add_.Tensor") > seconds("aten._fused_adamw_.default") + 0.001


@pytest.mark.parametrize("size", [10, 10**9])
def test_repeated_micro_batches_take_as_long_as_written_out(size):
    batch, update = [add(size), add(0, Phase.BACKWARD), mm(512, 512, 512)], [add(0, Phase.OPTIMIZER)] * 40
    short = step_time(trace([*batch, *update], repeated=(3, 7)), recipe(), GPU)
    long = step_time(trace([*batch * 7, *update]), recipe(), GPU)
    assert short.seconds == pytest.approx(long.seconds)
    assert short.backward == pytest.approx(long.backward)


@pytest.mark.parametrize("device", [GPU, CPU])
def test_phases_sum_to_the_step(device):
    ops = [add(10**7), mm(512, 512, 512), add(10**6, Phase.RECOMPUTE), mm(512, 512, 512, phase=Phase.BACKWARD),
           add(10**5, Phase.OPTIMIZER, op_class=OpClass.OTHER), add(3, Phase.EVALUATION)]
    found = step_time(trace(ops, repeated=(4, 3)), recipe(device), device)
    phases = found.forward + found.recompute + found.backward + found.optimizer
    assert phases + found.data == pytest.approx(found.seconds)
    assert min(found.forward, found.recompute, found.backward, found.optimizer, found.data) > 0


def test_compiled_kernels_are_cheaper_to_issue_and_those_in_a_graph_cheaper_still():
    eager, fused = [add(0), mm(16, 16, 16)] * 100, [add(0, name="fused add mul"), mm(16, 16, 16)] * 100
    plain = step_time(trace(eager), recipe(), GPU).seconds
    compiled = step_time(trace(fused), recipe(compile="per-block"), GPU).seconds
    graphs = step_time(trace(fused), recipe(compile={"name": "per-block", "mode": "reduce-overhead"}), GPU).seconds
    assert graphs < compiled < plain
    assert compiled == pytest.approx(200 * timing.COMPILED_SECONDS, rel=0.1)


def test_an_ops_further_kernels_cost_the_host_a_launch_each():
    one, three = (step_time(trace([add(0, kernels=n)] * 200), recipe(), GPU).seconds for n in (1, 3))
    assert three - one == pytest.approx(200 * 2 * timing.LAUNCH_SECONDS)


def test_a_compiled_graphs_call_costs_the_host_once():
    ops = [replace(add(name="fused add"), calls=int(n % 10 == 0)) for n in range(1000)]
    uncalled = [replace(op, calls=0) for op in ops]
    more = step_time(trace(ops), recipe(), GPU).seconds - step_time(trace(uncalled), recipe(), GPU).seconds
    assert more == pytest.approx(100 * CALL_SECONDS)


def test_a_slower_host_is_in_the_interval_of_what_waits_for_it():
    large = [add(10**10)] * 3
    assert step_time(trace(large), recipe(), GPU).slower_host == 0
    bound = step_time(trace([add()] * 1000), recipe(), GPU)
    assert bound.slower_host == pytest.approx(HOST_ERROR * 1000 * FORWARD, rel=0.01)
    measured = replace(MEASURED, kind="cuda", host={"forward": FORWARD})
    assert 0 < step_time(trace([add()] * 1000), recipe(), GPU, measured).slower_host < bound.slower_host
    behind = [add(2 * 10**7)] * 1000  # the device takes a little longer than the host does
    found = step_time(trace(behind), recipe(), GPU)
    assert found.work[Work.HOST] < 0.1 * found.seconds < found.slower_host < bound.slower_host


def test_tf32_comes_from_the_recipes_precision():
    ops = trace([mm(8192, 8192, 8192, "float32")])
    slow, fast = (step_time(ops, recipe(precision=p), GPU).seconds for p in ("fp32", "tf32"))
    assert slow > 5 * fast


# Data


def test_the_global_batch_is_copied_over_the_link():
    ops = trace([add(10**11)])
    size = 2 * 64 * 1000 * 8  # ids and labels, int64
    sizes = {"batch_size": 64, "seq_len": 1000, "data": {"source": "dummy", "packing": False}}
    pinned = step_time(ops, recipe(**sizes), GPU)
    assert pinned.data == pytest.approx(size / (GPU.pcie_bandwidth * LINK_SHARE))
    ordinary = step_time(ops, recipe(**sizes, loading={"pin_memory": False}), GPU)
    assert ordinary.data == pytest.approx(size / (GPU.pcie_bandwidth * PAGEABLE_SHARE))


def test_preparing_the_global_batch_shows_only_where_nothing_hides_it():
    sizes = {"batch_size": 1000, "seq_len": 1000}
    alone = 1000 * (timing.PREPARE_SECONDS[0] + 1000 * timing.PREPARE_SECONDS[1])
    short, long = trace([add(0)]), trace([add(10**12)])
    in_process, in_workers = ({**sizes, "loading": {"workers": n}} for n in (0, 2))
    assert step_time(short, recipe(**in_process), GPU).data >= alone
    assert step_time(short, recipe(**in_workers), GPU).data < alone / 2
    assert step_time(long, recipe(**in_process), GPU).seconds == pytest.approx(
        step_time(long, recipe(**in_workers), GPU).seconds)
    assert step_time(short, recipe(CPU, **sizes), CPU).data == pytest.approx(alone)


# The CPU, and a calibration

def test_the_cpu_takes_one_op_after_another():
    ops = [add(10**6), mm(100, 100, 100, "float32", Phase.BACKWARD), add(2 * 10**6, Phase.OPTIMIZER)]
    found = step_time(trace(ops), recipe(CPU), CPU, MEASURED)
    assert found.forward == pytest.approx(1e-4 + 1e-5)
    assert found.backward == pytest.approx(2e6 / RATE + 5e-6)
    assert found.optimizer == pytest.approx(2e-4 + 1e-6)
    assert found.calibrated
    assert found.notes == ()


def test_without_measurements_the_cpu_is_guessed_by_its_cores():
    one, eight = (op_seconds(mm(512, 512, 512, "float32"), replace(CPU, units=n)) for n in (1, 8))
    assert one == pytest.approx(8 * eight)
    found = step_time(trace([add()]), recipe(CPU), CPU)
    assert not found.calibrated


def test_a_calibration_of_another_kind_of_device_does_not_count():
    assert not step_time(trace([add()]), recipe(), GPU, MEASURED).calibrated


def test_a_trace_without_a_step_takes_no_time():
    found = step_time(Trace(origin="predicted"), recipe(CPU), CPU)
    assert found.seconds == found.data

"""What a report's charts and tables are drawn from: curves that keep their peaks, and sums that add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.profiling.profiled import empty, hostile, predicted, profile
from tightfit.backends import load_backend
from tightfit.devices import find_device
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.timing.op_times import op_seconds
from tightfit.profiling.report.compare import compared, figures, headline, in_columns, pairs, side_by_side, utilization
from tightfit.profiling.report.memory import (
    CURVE_POINTS,
    by_category,
    curves,
    downsample,
    layout,
    parts_of,
)
from tightfit.profiling.report.page import report
from tightfit.profiling.step import (
    block_name,
    busy_seconds,
    module_of,
    op_class,
    op_groups,
    seconds_by,
    step_of,
    steps_of,
)
from tightfit.text import size
from tightfit.trace import Allocation, Category, Phase, Span, Trace

CARD = find_device("rtx-4090")


@pytest.mark.parametrize("origin", ["predicted", "measured"])
def test_categories_are_the_traces_own_at_every_tick(origin):
    trace = getattr(profile(), origin)
    ticks, held = by_category(trace.allocations)
    own_ticks, live = trace.curve()
    at = np.searchsorted(ticks, own_ticks)
    assert (held[at].sum(axis=1) == live).all()
    for i in range(0, len(ticks), max(len(ticks) // 60, 1)):
        assert dict(zip(Category, held[i].tolist(), strict=True)) == trace.by_category(int(ticks[i]))


def test_an_allocation_that_dies_before_it_turns_stays_temporary():
    short = Allocation(born=1, died=3, bytes=8, category=Category.ACTIVATIONS, category_since=5)
    _, held = by_category([short])
    assert held[:, list(Category).index(Category.TEMPORARY)].tolist() == [8, 0]
    assert not held[:, list(Category).index(Category.ACTIVATIONS)].any()


def test_a_curve_has_the_steps_peak_and_its_seconds():
    made = profile()
    for name, curve in curves(made).items():
        trace = getattr(made, name)
        step = step_of(trace)
        assert curve.peak_bytes == trace.peak(step.start, step.stop)[1] == curve.total.max()
        assert (np.diff(curve.seconds) >= 0).all()
        assert curve.seconds[0] == 0
        assert curve.seconds[-1] == pytest.approx(made.step_seconds)
        assert len(curve.seconds) <= CURVE_POINTS + 2


def test_predicted_and_measured_parts_lie_over_each_other():
    both = curves(profile())
    assert [s.phase for s in both["measured"].parts] == [Phase.FORWARD, Phase.BACKWARD] * 4 + [Phase.OPTIMIZER]
    assert [(s.phase, s.begin, s.end) for s in both["measured"].parts] == [
        (s.phase, s.begin, s.end) for s in both["predicted"].parts]


def test_downsampling_keeps_every_spike():
    seconds, total = np.linspace(0, 1, 100_000), np.ones(100_000, np.int64)
    spikes = np.arange(50, 100_000, 1000)
    total[spikes] = np.arange(len(spikes)) + 10
    kept = downsample(seconds, total)
    assert len(kept) <= CURVE_POINTS
    assert set(spikes) <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()


def test_a_layout_gives_each_phase_its_seconds():
    seconds = {Phase.DATA: 1.0, Phase.FORWARD: 4.0, Phase.BACKWARD: 6.0, Phase.OPTIMIZER: 1.0}
    drawn = layout(parts_of(predicted()), seconds)
    assert drawn[0].begin == 1.0
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        assert sum(s.end - s.begin for s in drawn if s.phase is phase) == pytest.approx(seconds[phase])
    assert drawn[-1].end == pytest.approx(12.0)


def test_very_many_micro_batches_are_drawn_once():
    spans = [Span(name="step 1", start=0, stop=9, step=1), Span(name="forward", start=0, stop=4, step=1, times=10**9),
             Span(name="backward", start=4, stop=8, step=1, times=10**9)]
    assert len(parts_of(Trace(origin="predicted", spans=spans))) == 2


def test_seconds_add_up():
    made = profile()
    ops = steps_of(made)["measured"].ops
    busy = busy_seconds(ops)
    assert busy == pytest.approx(sum(op.seconds for op in made.measured.ops))
    for key in (op_class, module_of):
        assert sum(sum(row.values()) for row in seconds_by(ops, key).values()) == pytest.approx(busy)
    groups = op_groups(ops, CARD, tf32=False)
    assert sum(group.total for group in groups) == pytest.approx(busy)
    assert [group.total for group in groups] == sorted((group.total for group in groups), reverse=True)
    assert all(0 < group.achieved < 1.3 for group in groups if group.achieved is not None)
    assert any(group.intensity for group in groups)


def test_predicted_ops_count_as_often_as_they_run():
    made = profile()
    ops = steps_of(made)["predicted"].ops
    runs = sum(group.runs for group in op_groups(ops, CARD, tf32=False))
    assert sum(times for _, times in ops) == runs == len(made.measured.ops)
    assert max(times for _, times in ops) == 3
    assert busy_seconds(ops) == pytest.approx(sum(n * op_seconds(op, CARD) for op, n in made.predicted.step_ops()))


def test_module_names_without_block_numbers():
    assert block_name("transformer.h.11.attn") == block_name("transformer.h.2.attn") == "transformer.h.*.attn"
    assert block_name("conv1.block2") == "conv1.block2"
    assert block_name("") == "(outside of all modules)"


def test_pairs_sum_up():
    made = profile()
    measured, guess = steps_of(made).values()
    found = compared(measured, guess, ("all", "all"))
    memory, classes = found["memory"], found["classes"]
    assert memory[-1].first == sum(pair.first for pair in memory[:-1]) == curves(made)["measured"].peak_bytes
    assert memory[-1].difference == memory[-1].second - memory[-1].first
    assert classes[-1].second == pytest.approx(busy_seconds(steps_of(made)["predicted"].ops))
    wall = pairs(measured.by_phase(), guess.by_phase(), "step")
    assert wall[-1].first == pytest.approx(made.step_seconds)
    assert [pair.name for pair in wall] == ["data", "forward", "backward", "optimizer", "step"]
    assert pairs({}, {"weights": 1}) == pairs({"weights": 0}, {"weights": 1}) == []


def test_the_headline():
    made = profile()
    said = {figure.name: figure.text for figure in figures(made)}
    assert said["tokens/s"] == f"{8 * 64 / made.step_seconds:,.0f}"
    assert said["peak allocated"] == size(made.peak_bytes)
    measured, predicted = headline(made).splitlines()
    assert measured.startswith("gpt2 on RTX 4090: tokens/s ")
    assert predicted.startswith("tokens/s: predicted ")
    assert f"predicted {size(made.predicted_peak_bytes)}" in predicted
    assert headline(empty()) == "gpt2 on RTX 4090"


def test_a_followed_step_that_is_far_slower_says_so_beside_the_figure():
    remarks = [{figure.name: figure.remark for figure in figures(replace(profile(), overhead=times))}["step"]
               for times in (1.4, 5.2)]
    assert ["the followed step took" in remark for remark in remarks] == [False, True]
    assert remarks[1].endswith("; the followed step took 5.2 times as long")


def test_predicted_seconds_that_are_not_calibrated_say_so():
    made = profile()
    rough = {figure.name: figure.remark for figure in figures(made)}
    sure = {figure.name: figure.remark for figure in figures(replace(made, calibrated=True))}
    for name in ("tokens/s", "step"):
        assert rough[name] == f"{sure[name]}, not calibrated"
        assert rough[name].startswith("predicted ")
    assert rough["peak allocated"] == sure["peak allocated"]
    assert "predicted, not calibrated</th>" in report(made)
    assert "predicted, not calibrated</th>" not in report(replace(made, calibrated=True))


def test_mfu_is_one_formula_over_flops_of_two_sources():
    made = profile(data="dummy")
    share, source = utilization(made, made.step_seconds)
    assert source == "from the model's shape"
    assert share == standard_tools(load_backend("pytorch")).mfu(made.recipe, made.device, made.step_seconds)
    named = replace(made, recipe=made.recipe.model_copy(update={"model": "someone/else"}))
    other, source = utilization(named, made.step_seconds)
    assert source == "from the ops of the predicted step"
    assert other == pytest.approx(share, rel=0.1)
    assert utilization(hostile(), 1.0)[0] > 0
    assert utilization(replace(made, device=replace(CARD, flops={})), 1.0) == (None, "the device's peak is not known")
    assert utilization(empty(), 0.0) == (None, "")


def test_padded_rows_are_not_taken_for_full_ones():
    made = profile()
    rows = made.recipe.batch_size * made.recipe.seq_len
    padded = replace(made, tokens=rows / 8)
    full, part = ({figure.name: figure for figure in figures(each)} for each in (made, padded))
    guess = made.predicted_step_seconds
    assert part["tokens/s"].value == pytest.approx(full["tokens/s"].value / 8)
    assert part["tokens/s"].remark.startswith(f"predicted {rows / guess:,.0f} of full rows")
    assert full["tokens/s"].remark.startswith(f"predicted {rows / guess:,.0f}, ")
    assert "of full rows" in part["step"].remark
    assert "of full rows" in part["peak allocated"].remark
    assert part["MFU"].value == pytest.approx(full["MFU"].value / 8)


def test_a_long_figure_of_two_runs_takes_several_lines():
    figures = "3 s: loading, steps and saving " * 3
    lines = in_columns([("", "runs/a", "runs/b"), ("whole run", figures, "2 s")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 80
    assert " ".join(lines[1:]).replace("whole run", "").replace(" 2 s", "").split() == figures.split()


def test_two_runs_side_by_side():
    ours = profile()
    theirs = replace(ours, step_seconds=ours.step_seconds / 2, peak_bytes=2 * ours.peak_bytes)
    lines = side_by_side(ours, theirs, ("runs/a", "runs/b")).splitlines()
    assert lines[0].split() == ["runs/a", "runs/b", "difference"]
    assert len({len(line) for line in lines}) == 1
    rows = {line.split("  ")[0]: line for line in lines}
    assert set(rows) == {"", "tokens/s", "step", "MFU", "peak allocated", "data", "forward", "backward", "optimizer"}
    assert rows["tokens/s"].endswith("+100.0 %")
    assert rows["step"].endswith("-50.0 %")
    assert rows["peak allocated"].endswith("+100.0 %")
    assert size(theirs.peak_bytes) in rows["peak allocated"]

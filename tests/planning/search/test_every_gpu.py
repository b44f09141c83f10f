"""One recipe on many GPUs: in which order, at which price, with how many traces."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.display.plans import fitting, nothing_fits
from tests.planning.ops import gpu
from tests.planning.toy import Toy
from tightfit.devices import find_device
from tightfit.errors import RecipeError
from tightfit.planning.plan import Interrupted
from tightfit.planning.search.evaluate import InProcess
from tightfit.planning.search.every_gpu import GpuRow, compare, parse_prices
from tightfit.planning.search.search import search
from tightfit.recipe import Recipe
from tightfit.trace import Trace, UntracedMemory

RECIPE = Recipe(batch_size=8, compile="off")


@pytest.fixture(scope="module")
def toy():
    return Toy.drawn(3)


@pytest.fixture(scope="module")
def devices():
    return [gpu(1 << 40, "roomy"), gpu(1 << 40, "ample"), gpu(8 << 20, "tiny"), gpu(1 << 40, "older", (7, 5))]


def test_every_gpu_gets_its_own_plan(toy, devices):
    found = compare(RECIPE, devices, toy.tools())
    assert {row.device.name for row in found.rows} == {"roomy", "ample", "tiny", "older"}
    for row in found.rows:
        alone = search(RECIPE, row.device, toy.tools())
        assert [c.recipe for c in row.plan.candidates[:1]] == [c.recipe for c in alone.candidates[:1]]
        assert (row.chosen is None) == (alone.chosen is None)
        assert row.plan.predictions <= alone.predictions


def test_what_was_planned_before_ctrl_c_is_told(toy, devices):
    def told(done, count, text):
        if "ample" in text:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        compare(RECIPE, devices[:3], toy.tools(), progress=told)
    assert [row.device.name for row in caught.value.found.rows] == ["roomy"]
    assert caught.value.said == "1 of 3 GPUs were planned"
    with pytest.raises(KeyboardInterrupt) as caught:
        compare(RECIPE, devices[1:3], toy.tools(), progress=told)
    assert not isinstance(caught.value, Interrupted)


def test_alike_gpus_share_their_traces(toy, devices):
    one = replace(toy, calls=[])
    compare(RECIPE, devices[:1], one.tools())
    both = replace(toy, calls=[])
    compare(RECIPE, devices[:2], both.tools())
    assert 0 < len(both.calls) == len(one.calls)
    older = replace(toy, calls=[])
    compare(RECIPE, [devices[0], devices[3]], older.tools())
    assert len(older.calls) > len(one.calls)


def test_a_trace_is_remembered_for_one_capability():
    calls = []

    def predict(recipe, device):
        calls.append(device.capability)
        return Trace(origin="predicted")

    remembered = InProcess(replace(Toy.drawn(3).tools(), predict=predict)).trace
    first = remembered(RECIPE, gpu(1, "a"))
    assert remembered(RECIPE, gpu(2, "b")).ops is first.ops
    remembered(RECIPE.override(seq_len=8), gpu(2, "b"))
    remembered(RECIPE, gpu(1, "c", (9, 0)))
    assert calls == [(8, 0), (8, 0), (9, 0)]


def test_what_a_trace_does_not_show_is_each_gpus_own():
    def untraced(recipe, device, trace):
        return [UntracedMemory(name="context", bytes=device.memory_bytes, where="context", source=device.name)]

    def predict(recipe, device):
        return Trace(origin="predicted", untraced=untraced(recipe, device, None))

    remembered = InProcess(replace(Toy.drawn(3).tools(), predict=predict, untraced=untraced)).trace
    found = [remembered(RECIPE, gpu(size, name)) for name, size in (("a", 1), ("b", 2), ("a", 1))]
    assert [trace.untraced[0].source for trace in found] == ["a", "b", "a"]
    assert [trace.untraced[0].bytes for trace in found] == [1, 2, 1]
    assert found[1].ops is found[0].ops


def test_the_best_comes_first_and_what_does_not_serve_last(toy, devices):
    pinned = RECIPE.override(precision="bf16")
    rows = compare(pinned, devices, toy.tools()).rows
    assert [row.device.name for row in rows][-2:] == ["tiny", "older"]
    assert "bf16" in rows[-1].refused
    assert rows[-1].plan is None
    assert rows[-2].plan.chosen is None
    assert rows[0].speed >= rows[1].speed > 0


def test_prices_order_by_throughput_for_the_price(toy, devices):
    rows = compare(RECIPE, devices, toy.tools()).priced({"ample": 2.0, "older": 0.001, "tiny": 1.0}).rows
    assert [row.device.name for row in rows] == ["older", "ample", "roomy", "tiny"]
    assert rows[0].per_price == rows[0].speed / 0.001
    assert rows[2].per_price is None
    assert rows[3].per_price is None


def test_json_has_one_entry_a_gpu(toy, devices):
    rows = [GpuRow(device=fitting().device, plan=fitting(), price=2.0),
            GpuRow(device=nothing_fits().device, plan=nothing_fits()), GpuRow(device=devices[0], refused="no")]
    fits, large, refused = (json.loads(json.dumps(row.to_json())) for row in rows)
    assert (fits["price"], fits["per_price"], fits["refused"]) == (2.0, 5000.0, None)
    assert [c["fits"] for c in fits["candidates"]] == ["yes"]
    assert [c["fits"] for c in large["candidates"]] == ["no"]
    assert large["per_price"] is None
    assert (refused["candidates"], refused["refused"]) == ([], "no")
    planned = compare(RECIPE, devices[:1], toy.tools()).to_json()["gpus"][0]
    assert planned["device"]["host_memory_assumed"]
    assert planned["device"]["host_memory_bytes"] > 0


def test_progress_names_the_gpu(toy, devices):
    told = []
    compare(RECIPE, devices, toy.tools(), progress=lambda *words: told.append(words))
    assert {most for _, most, _ in told} == {4}
    assert {done for done, _, _ in told} == {0, 1, 2, 3}
    assert all(any(text.startswith(f"{device.name}: ") for _, _, text in told) for device in devices)


def test_prices_are_read():
    assert parse_prices(["rtx-4090=0.35", "a100-80gb-sxm=1.5"]) == {"RTX 4090": 0.35, "A100 80GB SXM": 1.5}
    assert find_device("rtx-4090").name == "RTX 4090"


@pytest.mark.parametrize("given", [
    ["rtx-4090"], ["rtx-4090=cheap"], ["rtx-4090=0"], ["rtx-4090=-1"], ["rtx-4090=nan"], ["rtx-4090=inf"], ["=1"],
    ["rtx-4091=1"], ["a100=1"], ["rtx-4090=1", "4090=2"],
])
def test_wrong_prices_are_refused(given):
    with pytest.raises(RecipeError):
        parse_prices(given)

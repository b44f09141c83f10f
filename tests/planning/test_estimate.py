"""One candidate's cost: memory through the allocator, categories that add up, time, and what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.toy import Toy
from tightfit.devices import MIB, Device
from tightfit.planning.allocator.replay import replay
from tightfit.planning.costs import FitRank
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import Margin, by_category, capacity, estimate, predict_memory, running_at
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.timing.step_time import StepTime
from tightfit.planning.timing.uncertainty import Work
from tightfit.recipe import Recipe
from tightfit.trace import Allocation, Category, Place, Span, Trace, UntracedMemory

TOY = Toy.drawn(3)
NOTHING = Margin(share=0.0, fixed=0, host=0.0)
PLAIN = Recipe()


def gpu(memory_bytes):
    return Device(kind="cuda", name="toy", memory_bytes=memory_bytes, capability=(8, 0), bandwidth=1e12,
                  flops={"bf16": 1e14, "fp32": 1e13, "tf32": 5e13}, units=100)


def recipe_on(device, **fields):
    return resolve(Recipe(batch_size=8, micro_batch_size=2, loading={"workers": 2}, **fields), device)


def small(kind="cuda"):
    """Weights of 3 MiB and a passing 700,001 bytes; 5 MiB of context, 2 MiB that the allocator holds untraced."""
    return Trace(
        origin="predicted",
        allocations=[
            Allocation(born=1, died=None, bytes=3 * MIB, category=Category.WEIGHTS),
            Allocation(born=5, died=8, bytes=700_001),
        ],
        spans=[Span(name="forward", start=4, stop=9, step=1), Span(name="step 1", start=3, stop=12, step=1)],
        untraced=[UntracedMemory(name="context", bytes=5 * MIB, where="context", source=""),
                UntracedMemory(name="workspace", bytes=2 * MIB, where="allocator", source=""),
                UntracedMemory(name="pinned", bytes=77, where="host", source="")],
    )


def test_the_processor_has_no_allocator():
    device = Device(kind="cpu", name="CPU", memory_bytes=32 * MIB)
    found = predict_memory(small(), PLAIN, device, TOY.tools(NOTHING))
    assert found.peak_allocated == found.peak_reserved == 5 * MIB + 700_001
    assert (found.fit_rank, found.capacity, found.missing) == (FitRank.SAFE, 27 * MIB, 0)
    assert found.by_category["weights"] == 3 * MIB
    assert found.by_category["temporary"] == 700_001
    assert found.by_category["other"] == 2 * MIB
    assert (found.context, found.host, found.peak_in) == (5 * MIB, 77, "forward of a micro-batch")


@pytest.mark.parametrize(("total", "rank", "missing"), [(11 * MIB, FitRank.SAFE, 0), (10 * MIB, FitRank.NONE, 700_001)])
def test_the_processor_fits_to_the_byte(total, rank, missing):
    device = Device(kind="cpu", name="CPU", memory_bytes=total)
    found = predict_memory(small(), PLAIN, device, TOY.tools(NOTHING))
    assert (found.fit_rank, found.missing) == (rank, missing)


def test_the_allocator_rounds():
    """By its rules: 3 MiB in a segment of 20 MiB, from which the workspace's 2 MiB are cut too; 700,001 bytes are
    rounded to a multiple of 512 in a segment of 2 MiB."""
    device = gpu(64 * MIB)
    tools = replace(standard_tools(TOY), margin=NOTHING)
    trace = small()
    trace.untraced.pop(1)
    found = predict_memory(trace, PLAIN, device, tools)
    assert found.peak_allocated == 3 * MIB + 700_416
    assert found.peak_reserved == 22 * MIB
    assert found.by_category["other"] == 700_416 - 700_001
    assert found.fit_rank is FitRank.SAFE
    found = predict_memory(trace, PLAIN, gpu(26 * MIB), tools)
    assert (found.fit_rank, found.capacity) == (FitRank.NONE, 21 * MIB)
    assert found.missing == 1 * MIB


def test_the_margin_decides_what_is_safe_not_what_fits():
    tools = standard_tools(TOY)
    trace = small()
    trace.untraced.clear()
    for fixed, rank in ((2 * MIB, FitRank.SAFE), (2 * MIB + 1, FitRank.TIGHT)):
        found = predict_memory(trace, PLAIN, gpu(24 * MIB), replace(tools, margin=Margin(share=0.0, fixed=fixed)))
        assert (found.fit_rank, found.margin) == (rank, fixed)
    assert Margin(share=0.25, fixed=3).of(gpu(100)) == 28


@pytest.mark.parametrize(("within_margin", "whole", "rank"), [
    ("yes", "yes", FitRank.SAFE), ("with-retries", "yes", FitRank.SAFE),
    ("no", "with-retries", FitRank.TIGHT), ("no", "no", FitRank.NONE),
])  # fmt: skip
def test_a_fit_after_retries_within_the_margin_is_safe(within_margin, whole, rank):
    device, margin = gpu(64 * MIB), Margin(share=0.0, fixed=MIB)

    def replayed(trace, room, settings):
        return replace(replay(trace, None, settings), fits=whole if room == capacity(trace, device) else within_margin)

    found = predict_memory(small(), PLAIN, device, replace(TOY.tools(margin), replay=replayed))
    assert found.fit_rank is rank


def test_categories_sum_to_the_peak():
    device = gpu(1 << 34)
    recipe = recipe_on(device, precision="bf16")
    tools = replace(standard_tools(TOY), step_time=TOY.seconds)
    for checkpointing in ("none", "every-block"):
        changed = recipe.override(checkpointing=checkpointing)
        cost = estimate(TOY.predict(changed, device), changed, device, tools)
        assert sum(cost.memory.by_category.values()) == cost.memory.peak_allocated
        assert all(isinstance(count, int) and count >= 0 for count in cost.memory.by_category.values())
        assert set(cost.memory.by_category) == {
            "weights", "gradients", "optimizer", "activations", "temporary", "other"}
        assert cost.memory.by_category["weights"] == TOY.blocks * TOY.weights * 4


def test_a_cache_of_keys_has_a_category_where_there_is_one():
    trace = Trace(origin="predicted", allocations=[Allocation(born=1, died=None, bytes=5, category=Category.KV_CACHE)])
    assert by_category(trace, 1, 7) == {"weights": 0, "gradients": 0, "optimizer": 0, "activations": 0, "kv-cache": 5,
                                        "temporary": 0, "other": 2}


def test_time_follows_from_seconds():
    device = gpu(1 << 34)
    recipe = recipe_on(device, seq_len=128)
    cost = estimate(TOY.predict(recipe, device), recipe, device, TOY.tools())
    assert cost.time.samples_per_second == pytest.approx(8 / cost.time.step_seconds)
    assert cost.time.tokens_per_second == pytest.approx(1024 / cost.time.step_seconds)
    assert cost.time.mfu == 0.5


def test_images_have_no_tokens():
    device = gpu(1 << 34)
    recipe = recipe_on(device, task="image-classification", model="vit-base", data="dummy")
    time = estimate(TOY.predict(recipe, device), recipe, device, TOY.tools()).time
    assert time.tokens_per_second == 0
    assert time.samples_per_second > 0


def test_names_what_runs_at_the_peak():
    trace = small()
    assert running_at(trace, 5) == "forward of a micro-batch"
    assert running_at(trace, 10) == "step 1"
    assert running_at(trace, 2) == "building the model"


def test_the_context_is_no_room():
    assert capacity(small(), gpu(64 * MIB)) == 59 * MIB
    assert capacity(small(), gpu(2)) == 0


def test_standard_tools_count_flops_from_the_shape():
    """12 layers of 7,077,888 weights and a head of 38,597,376: 6 FLOPs each a token, and 12 for each pair, layer and
    feature (arXiv 2204.02311, appendix B), of documents of a quarter of a row."""
    device = gpu(1 << 34)
    tools = standard_tools(TOY)
    recipe = recipe_on(device, model="gpt2", seq_len=1024, precision="bf16")
    flops = 8 * 1024 * (6 * (12 * 7_077_888 + 768 * 50_257) + 12 * 12 * 768 * 1024 / 4)
    assert tools.mfu(recipe, device, 2.0) == pytest.approx(flops / 2.0 / 1e14, rel=1e-6)
    assert tools.mfu(recipe, replace(device, flops={}), 2.0) == 0
    assert standard_tools(TOY, module=object()).mfu(recipe, device, 2.0) == 0  # the recipe's model is not its own
    full = recipe.override(precision="tf32")
    assert tools.mfu(full, device, 2.0) == pytest.approx(flops / 2.0 / 5e13, rel=1e-6)


# Memory in the host


def offloading():
    """As `small`, with 3 MiB in the host's memory from tick 2 on, and another 700,001 bytes in ticks 5 to 8."""
    trace = small()
    trace.allocations += [
        Allocation(born=2, died=None, bytes=3 * MIB, category=Category.OPTIMIZER, place=Place.HOST, pinned=True),
        Allocation(born=5, died=8, bytes=1 << 20, place=Place.HOST, pinned=True),
    ]
    return trace


def test_what_lies_in_the_host_takes_nothing_of_the_device():
    plain, found = (predict_memory(trace, PLAIN, gpu(64 * MIB), replace(standard_tools(TOY), margin=NOTHING))
                    for trace in (small(), offloading()))
    assert found == replace(plain, host=found.host, host_by_category=found.host_by_category,
                            host_states_outside=3 * MIB)
    assert plain.host == 77
    assert found.host == 77 + 4 * MIB
    assert found.host_by_category["optimizer"] == 3 * MIB
    assert sum(found.host_by_category.values()) == found.host - 77
    assert plain.host_by_category == {}


def test_a_host_that_is_too_small_is_the_reason():
    need = 77 + 4 * MIB
    for have, rank, missing in ((need, FitRank.SAFE, 0), (need - 1, FitRank.NONE, 1)):
        device = replace(gpu(64 * MIB), host_bytes=have)
        found = predict_memory(offloading(), PLAIN, device, replace(standard_tools(TOY), margin=NOTHING))
        assert (found.fit_rank, found.host_missing, found.missing) == (rank, missing, 0)
        assert len(found.notes) == missing
    device = replace(gpu(64 * MIB), host_bytes=2 * need)
    spared = predict_memory(offloading(), PLAIN, device, replace(standard_tools(TOY), margin=Margin(host=0.75)))
    assert spared.host_missing == need - need // 2
    assert spared.host_needed == pytest.approx(4 * need)
    assert "with its margin free" in spared.notes[0]
    tools = replace(standard_tools(TOY), margin=NOTHING)
    nothing = predict_memory(small(), PLAIN, replace(gpu(64 * MIB), host_bytes=1), tools)
    assert nothing.fit_rank is FitRank.SAFE  # what loading takes is a matter of the run


def test_a_processors_memory_is_the_hosts():
    found = predict_memory(offloading(), PLAIN, replace(gpu(64 * MIB), kind="cpu"), TOY.tools(NOTHING))
    assert found.peak_allocated == 3 * MIB + 700_001 + 4 * MIB + 2 * MIB
    assert (found.fit_rank, found.host) == (FitRank.SAFE, 77)


def test_cached_memory_that_is_given_back_costs_its_segments():
    """30 MiB of a step's, in a segment, beside what stays."""
    device = gpu(1 << 30)
    trace = Trace(origin="predicted", allocations=[Allocation(born=0, died=None, bytes=2 * MIB),
                                                   Allocation(born=5, died=9, bytes=30 * MIB)])
    trace.spans = [Span(name="step 1", start=1, stop=5, step=1), Span(name="step 2", start=5, stop=9, step=2)]
    tools = replace(TOY.tools(), replay=replay, step_time=lambda *_: StepTime(seconds=0.1))
    kept, emptied = (estimate(trace, recipe_on(device, empty_cache_steps=every), device, tools) for every in (None, 4))
    assert not any("empty_cache_steps" in note for note in kept.notes)
    (said,) = (note for note in emptied.notes if "empty_cache_steps" in note)
    assert "every 4 steps 30.0 MiB" in said
    assert "1 segment again" in said
    assert emptied.time.step_seconds == pytest.approx(kept.time.step_seconds + 1e-3 / 4)
    assert emptied.time.work[Work.HOST] == pytest.approx(1e-3 / 4)


def test_what_is_taken_again_after_a_retry_is_in_the_steps_time():
    """40 MiB that are cached make no room for 50; where the device has but 60 they are released, in each of the three
    micro-batches that the trace holds once."""
    grows = [Allocation(born=1, died=2, bytes=40 * MIB), Allocation(born=3, died=4, bytes=50 * MIB),
             Allocation(born=5, died=6, bytes=40 * MIB), Allocation(born=7, died=8, bytes=55 * MIB)]
    spans = [Span(name="step 1", start=0, stop=9, step=1), Span(name="forward", start=5, stop=9, step=1, times=3)]
    trace = Trace(origin="predicted", allocations=grows, spans=spans)
    tools = replace(TOY.tools(NOTHING), replay=replay, step_time=lambda *_: StepTime(seconds=0.1))
    free, tight = (estimate(trace, PLAIN, gpu(total * MIB), tools) for total in (200, 60))
    assert (free.memory.verdict, tight.memory.verdict) == ("yes", "with-retries")
    assert (free.memory.taken_again, tight.memory.retries, tight.memory.taken_again) == (0, 2, 1 + 3)
    assert tight.time.step_seconds == pytest.approx(free.time.step_seconds + 4e-3)

"""Plans of several GPUs: which way shares the model, how it scales, and how many would do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.display.plans import estimate
from tightfit.backends import load_backend
from tightfit.devices import MIB, find_device
from tightfit.display.plan_table import ReadablePlan
from tightfit.planning.cluster import Cluster
from tightfit.planning.costs import FitRank
from tightfit.planning.estimate import Margin
from tightfit.planning.plan import Plan
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.more_gpus import more_gpus
from tightfit.planning.search.search import search
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.timing.uncertainty import Work
from tightfit.recipe import Recipe
from tightfit.text import size

PINNED = {
    "model": "gpt2", "model_overrides": {"n_layer": 2, "n_head": 8, "n_embd": 512, "n_positions": 64},
    "vocab_size": 4096, "seq_len": 64, "batch_size": 16, "micro_batch_size": 8, "precision": "bf16",
    "optimizer": "adamw", "attention": "sdpa", "loss": "plain", "checkpointing": "none", "compile": "off",
    "offload": "none", "expandable_segments": False,
}  # fmt: skip
TOOLS = replace(standard_tools(load_backend("pytorch")), margin=Margin(share=0.0, fixed=0))
CARD = find_device("rtx-3090")


def planned(cluster: Cluster, memory: int = CARD.memory_bytes, **changes) -> Plan:
    recipe = Recipe.from_dict({**PINNED, **changes})
    return search(recipe, cluster.on(replace(CARD, memory_bytes=memory)), TOOLS)


@pytest.fixture(scope="module")
def two() -> Plan:
    return planned(Cluster(cards=2))


def test_what_fits_one_gpu_is_not_divided(two):
    assert two.recipe.parallel.name == "ddp"
    assert two.recipe.parallel.process_count == 2
    assert two.answers.more_gpus == ""
    values = two.to_json()
    assert (values["device"]["gpus"], values["device"]["nodes"]) == (2, 1)
    assert values["candidates"][0]["recipe"]["parallel"] == {"name": "ddp", "processes": 2}


def test_scaling_is_held_to_one_gpu_alone(two):
    scaling, time = two.answers.scaling, two.chosen.estimate.time
    assert scaling.per_gpu == pytest.approx(time.throughput / 2)
    alone = planned(Cluster(), batch_size=8)
    assert scaling.efficiency == pytest.approx(scaling.per_gpu / alone.chosen.estimate.time.throughput)
    assert 0.1 < scaling.efficiency < 1
    assert alone.answers.scaling is None
    assert two.to_json()["scaling"]["efficiency"] == scaling.efficiency
    assert "scaling efficiency" in " ".join(str(ReadablePlan.of(two)).split())


def test_one_gpu_alone_that_holds_the_model_without_the_margin_is_said_to(two):
    used = two.chosen.estimate.memory.used
    wide = replace(TOOLS, margin=Margin(share=0.0, fixed=used))
    found = search(Recipe.from_dict(PINNED), Cluster(cards=2).on(replace(CARD, memory_bytes=used + 64 * MIB)), wide)
    text = found.answers.scaling.text
    assert "One GPU alone, with its share of the global batch and less than the safety margin free, does" in text


@pytest.mark.parametrize(("batch", "cards", "said"), [
    (16, 32, "A global batch of 16 leaves 16 of the GPUs without a sample: write batch_size=32 or more."),
    (16, 3, "A global batch of 16 gives 1 of the GPUs 6 and the others, which wait, 5: batch_size=18 divides evenly."),
    (16, 4, ""),
])
def test_unequal_shares_of_a_global_batch_are_said(batch, cards, said):
    text = planned(Cluster(cards=cards), batch_size=batch, micro_batch_size=1).answers.scaling.text
    assert said in text
    assert ("A global batch of" in text) == bool(said)


def test_what_does_not_fit_one_gpu_is_divided(two):
    """Just less memory than the copies of two processes take."""
    used = two.chosen.estimate.memory.used
    found = planned(Cluster(cards=2), used - 8 * MIB)
    assert found.recipe.parallel.name == "fsdp"
    assert "parallel=fsdp divides them" in found.answers.more_gpus
    scaling = found.answers.scaling
    assert ("does not hold the model with these techniques: it lacks" in scaling.text) == (scaling.efficiency is None)
    assert scaling.efficiency is None or scaling.efficiency < 1
    assert found.chosen.estimate.memory.used < used


@pytest.mark.parametrize("fits_whole", [True, False])
def test_gpus_that_hold_all_are_counted_only_where_nothing_fits_without_the_host(fits_whole):
    """With one sample of a micro-batch's eight."""
    states = Recipe.from_dict({**PINNED, "offload": {"name": "host", "weights": 0, "gradients": 0}})
    whole = estimate() if fits_whole else estimate(device_rank=FitRank.NONE)
    offloading, resident = (
        Evaluated(recipe=recipe, estimate=cost, passes=16 << 30, outside=0, held=0, gradients=0, parameters=2 * 10**9,
                  events=0)
        for recipe, cost in ((states, estimate()), (Recipe.from_dict(PINNED), whole)))  # fmt: skip
    exploration = SimpleNamespace(device=CARD, found={0: offloading, 1: resident},
                                  usable_bytes=lambda worst: CARD.memory_bytes)
    said = more_gpus(exploration, offloading)
    assert said == ("" if fits_whole else (
        "Weights, gradients and optimizer states are 29.8 GiB whole, and a GPU's 23.6 GiB leave 22.0 GiB for them and "
        "for activations, beside 1.0 GiB of CUDA context and a safety margin of 1.0 GiB: with nothing in the host's "
        "memory parallel=fsdp divides them among about 2 such GPUs; plan with --gpus 2 for exact "
        "figures."))


def test_where_the_hosts_memory_is_too_small_a_drive_is_named_with_its_bytes(two):
    """20 bytes a parameter on the drive, and gradients in memory while they are summed; a step with one micro-batch a
    process gathers weights twice."""
    recipe = Recipe.from_dict({**PINNED, "parallel": {"name": "fsdp", "cpu_offload": True}})
    device = replace(Cluster(cards=2).on(CARD), host_bytes=32 * MIB)
    found = search(recipe.with_processes(2), device, TOOLS)
    assert found.chosen is None
    parameters = two.chosen.estimate.memory.by_category["weights"] // 4
    said = found.answers.more_gpus
    assert "parallel=zero parallel.stage=3 parallel.offload=nvme" in said
    assert f"leaves {size(20 * parameters)} on each machine's drive and {size(4 * parameters)} in its memory" in said
    assert f"reads {size(24 * parameters)} there and writes {size(20 * parameters)}" in said


def test_a_slow_network_binds():
    slow = planned(Cluster(machines=2, network=1e7), parallel={"name": "ddp", "processes": 2})
    time = slow.chosen.estimate.time
    assert "communication" in slow.answers.scaling.bound_by
    assert time.work[Work.COMMUNICATION] > 0.5 * time.step_seconds
    assert time.communication.link == "the network"
    assert time.to_json()["communication"]["bytes"] == time.communication.bytes


@pytest.mark.cold
def test_fsdp_that_waits_for_communication_is_weighed_with_less_of_it():
    """Several micro-batches over a slow network, of a model of which no two copies fit."""
    slow = Cluster(machines=2, network=1e8)
    whole = planned(slow, micro_batch_size=2, parallel={"name": "ddp", "processes": 2}).chosen.estimate.memory.used
    found = planned(slow, whole - 8 * MIB, micro_batch_size=2)
    ways = [candidate.recipe.parallel for candidate in found.candidates]
    assert (True, "every") in {(way.reshard, way.gradient_sync) for way in ways if way.name == "fsdp"}
    assert (found.recipe.parallel.reshard, found.recipe.parallel.gradient_sync) == (False, "last")

"""Several GPUs as a person names them."""

from __future__ import annotations

import pytest

from tightfit.devices import find_device
from tightfit.errors import RecipeError
from tightfit.planning.cluster import Cluster, on_cluster, parse_network, read_cluster
from tightfit.recipe import Recipe


@pytest.mark.parametrize(("given", "name", "cluster"), [
    (("rtx-4090",), "rtx-4090", Cluster()),
    (("8xh100-sxm",), "h100-sxm", Cluster(cards=8)),
    (("2 x RTX 4090",), "RTX 4090", Cluster(cards=2)),
    (("h100-sxm", 4), "h100-sxm", Cluster(cards=4)),
    ((None, 2), None, Cluster(cards=2)),
    (("8xh100-sxm", None, 4, "100Gbit"), "h100-sxm", Cluster(cards=8, machines=4, network=12.5e9)),
    (("h100-sxm", None, 2, "8x400Gbit"), "h100-sxm", Cluster(machines=2, network=400e9)),
])  # fmt: skip
def test_counts_and_names_are_told_apart(given, name, cluster):
    assert read_cluster(*given) == (name, cluster)


def test_a_device_is_one_of_them():
    device = Cluster(cards=8, machines=4, network=1e9).on(find_device("h100-sxm"))
    assert (device.world, device.cards, device.network_bandwidth) == (32, 8, 1e9)
    assert device.name == "H100 SXM"


@pytest.mark.parametrize(("given", "said"), [
    (("8xh100-sxm", 4), "both say how many"), (("h100-sxm", 0), "gpus: 0"), (("h100-sxm", 1, 0), "nodes: 0"),
    (("8xh100-sxm", None, 4), "--network 100Gbit"), (("8xh100-sxm", None, None, "10Gbit"), "there is one"),
    (("all", 8), "one device each"), (("2xcpu",), "one device each"), (("h100", 1, 2, "fast"), "not a speed"),
])  # fmt: skip
def test_what_contradicts_is_refused(given, said):
    with pytest.raises(RecipeError, match=said):
        read_cluster(*given)


@pytest.mark.parametrize(("text", "rate"), [
    ("100Gbit", 12.5e9), ("8x400Gbit", 400e9), ("25 Gb/s", 3.125e9), ("2.5gbps", 0.3125e9)])
def test_networks_are_read_in_bits(text, rate):
    assert parse_network(text) == rate


def recipe(**values):
    return Recipe.from_dict({"model": "gpt2", **values})


def test_a_recipe_has_a_process_for_each_gpu():
    two = Cluster(cards=2)
    shared, _ = on_cluster(recipe(parallel="fsdp"), two)
    assert shared.parallel.process_count == 2
    assert on_cluster(recipe(), two) == (recipe(), two)  # which way is searched
    _, cluster = on_cluster(recipe(parallel={"name": "ddp", "processes": 4}), Cluster())
    assert cluster == Cluster(cards=4)


@pytest.mark.parametrize(("values", "said"), [
    ({"parallel": {"name": "ddp", "processes": 4}}, "contradicts 2 GPUs"), ({"mode": "inference"}, "mode=train"),
    ({"backend": "jax"}, "backend=pytorch"),
])  # fmt: skip
def test_a_recipe_that_contradicts_them_is_refused(values, said):
    with pytest.raises(RecipeError, match=said):
        on_cluster(recipe(**values), Cluster(cards=2))

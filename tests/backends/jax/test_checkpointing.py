"""Remat in JAX: the same gradients, dropout and all, and matrix products really computed again."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.backends.jax.cases import SCANNED, UNROLLED, build, fast_options
from tightfit.backends.jax.update import abstract_global_batch, abstract_state, global_batch_gradients

KINDS = {
    "none": "none", "every-block": "every-block", "every-nth": "every-nth", "segments": "segments", "mlp": "mlp",
    "attention": "attention", "selective": "selective", "parts apart": {"name": "every-block", "apart": True},
    "attention kept": {"name": "selective", "keep": "attention"},
    "every other kept": {"name": "selective", "keep": "every-other-matmul"},
    "offloaded": {"name": "selective", "offload": True},
}  # fmt: skip
HOST = re.compile("pinned_host|MemorySpace.Host|<host>")
LAYOUTS = {"unrolled": UNROLLED, "scanned": SCANNED, "by two": {**SCANNED, "unroll": 2}}


def traced(kind: str, layout: str) -> Any:
    made = build(checkpointing=KINDS[kind], backend=LAYOUTS[layout], attention="eager",
                 model_overrides={"dropout_rate": 0.2, "num_layers": 3})

    def gradients(params, global_batch, key):
        return global_batch_gradients(made, params, global_batch, jnp.int32(32), jax.random.wrap_key_data(key))

    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=made.replicated)
    return jax.jit(gradients).trace(abstract_state(made)["params"], abstract_global_batch(made), key)


@cache
def lowered(kind: str, layout: str) -> jax.stages.Lowered:
    return traced(kind, layout).lower()


@cache
def computed(kind: str, layout: str) -> dict[str, np.ndarray]:
    made = build()
    params = made.network.init(jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, 64, (2, 2, 8)).astype(np.int32)
    global_batch = jax.device_put({"input_ids": ids, "labels": ids}, made.batch_sharding)
    run = lowered(kind, layout).compile(compiler_options=fast_options())
    return jax.device_get(run(jax.device_put(params, made.replicated), global_batch, np.zeros(2, np.uint32))[1])


@pytest.mark.parametrize(("kind", "layout"), [
    *(pytest.param(kind, "unrolled", marks=pytest.mark.cold) for kind in ("every-nth", "segments")),
    pytest.param("segments", "scanned", marks=pytest.mark.cold),
    *((kind, "unrolled") for kind in ("mlp", "selective")),
    *((kind, "scanned") for kind in ("every-block", "every-nth", "attention", "offloaded", "parts apart")),
    ("every-block", "by two"),
])
def test_gradients_are_those_without_it(kind, layout):
    plain, recomputed = computed("none", "unrolled"), computed(kind, layout)
    largest = max(np.abs(g).max() for g in plain.values())
    for name, gradient in plain.items():
        np.testing.assert_allclose(recomputed[name], gradient, atol=2e-6 * largest, err_msg=name)


def products(kind: str, layout: str = "unrolled") -> int:
    return lowered(kind, layout).as_text().count("stablehlo.dot_general")


def test_products_are_computed_again_as_each_kind_says():
    count = {kind: products(kind) for kind in KINDS}
    forward = 3 * 6  # of a layer: four matrices, and two of attention
    assert count["every-block"] > count["none"] + forward / 2
    assert count["none"] < count["every-nth"] < count["every-block"]
    assert count["none"] < count["mlp"] < count["every-block"]
    assert count["none"] < count["attention"] < count["every-block"]
    assert count["none"] < count["selective"] < count["every other kept"] < count["attention kept"]
    assert count["attention kept"] <= count["every-block"]
    assert count["mlp"] < count["parts apart"] <= count["every-block"]


def test_recomputation_is_kept_apart_where_both_stand_in_one_program():
    """XLA merges equal expressions: unrolled, nothing would be recomputed without a barrier."""
    assert "optimization_barrier" in lowered("every-block", "unrolled").as_text()
    assert "optimization_barrier" not in lowered("every-block", "scanned").as_text()
    assert "optimization_barrier" not in lowered("none", "unrolled").as_text()


def test_offloaded_values_are_meant_for_the_host():
    assert HOST.search(str(traced("offloaded", "scanned").jaxpr))
    assert not HOST.search(str(traced("selective", "scanned").jaxpr))


def test_scanned_layers_stand_once_in_the_program():
    assert products("none", "scanned") < products("none")
    assert "unroll=2" in str(traced("none", "by two").jaxpr)

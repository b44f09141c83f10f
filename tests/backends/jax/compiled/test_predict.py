"""Prediction: the real step, compiled for a card that is not there; its memory as XLA plans it, kept for later."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.backends.jax.cases import TINY
from tightfit.backends.jax.backend import JaxBackend
from tightfit.backends.jax.compiled import predict as predicting
from tightfit.backends.pytorch.model_size import model_size
from tightfit.devices import Device, find_device
from tightfit.errors import MissingLibrary, ModelError, Refused
from tightfit.planning.costs import FitRank
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import estimate
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe import Recipe
from tightfit.trace import Category, OpClass, Phase

A5000 = find_device("rtx-a5000")
BACKEND = JaxBackend()

WHOLE = """
import json, sys
from tightfit.backends.jax.compiled.worker import lowered_for
from tightfit.devices import find_device
from tightfit.recipe import Recipe
lowered, options = lowered_for(Recipe.from_dict(json.loads(sys.argv[1])), find_device("rtx-a5000"))
plan = lowered.compile(compiler_options=options).memory_analysis()
print(plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes - plan.alias_size_in_bytes)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("a cache")  # whose name XLA must be told in quotes


@pytest.fixture(scope="module")
def recipe(cache):
    return tiny(cache)


@pytest.fixture(scope="module")
def trace(recipe):
    return BACKEND.predict(recipe, A5000)


def tiny(cache, **changes):
    fields = {**TINY, "device": "auto", "attention": "eager", "precision": "bf16", "cache_dir": str(cache)}
    return resolve(Recipe.from_dict({**fields, **changes}), A5000)


def parameters(recipe):
    return model_size(recipe).parameters


@pytest.mark.cold
def test_the_peak_is_what_xla_says_of_the_whole_compilation(recipe, trace):
    said = subprocess.run([sys.executable, "-c", WHOLE, json.dumps(recipe.to_dict())], capture_output=True, text=True,
                          env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=True)
    assert trace.peak()[1] == int(said.stdout)


def test_the_state_is_told_apart_and_nothing_else_is_invented(recipe, trace):
    held = trace.by_category(trace.peak()[0])
    count = parameters(recipe)
    assert held[Category.WEIGHTS] == 4 * count
    assert held[Category.OPTIMIZER] == pytest.approx(8 * count, abs=8)  # and the number of updates
    assert held[Category.TEMPORARY] > 0
    assert held[Category.ACTIVATIONS] == held[Category.GRADIENTS] == 0
    weights = {a.module for a in trace.allocations if a.category is Category.WEIGHTS}
    assert "layers.*.mlp.input_layer.weight" in weights


def test_products_are_those_of_the_model(recipe, trace):
    counted = sum(op.flops for op in trace.ops if op.op_class is OpClass.CONTRACTION)
    assert counted == pytest.approx(recipe.batch_size * model_size(recipe).flops, rel=0.02)
    assert {op.phase for op in trace.ops} == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}


def test_recomputation_shows_with_its_products(cache, trace):
    kept = tiny(cache, checkpointing="every-block")
    found = BACKEND.predict(kept, A5000)
    again = sum(op.flops for op in found.ops if op.phase is Phase.RECOMPUTE)
    forward = sum(op.flops for op in found.ops if op.phase is Phase.FORWARD)
    assert 0 < again <= forward
    assert sum(op.flops for op in found.ops) > sum(op.flops for op in trace.ops)


def test_cudnn_attention_is_compiled_for_without_cudnn(cache):
    numbers = {**TINY["model_overrides"], "max_seq_len": 64}
    fused = tiny(cache, attention={"name": "sdpa", "kernel": "cudnn"}, seq_len=64, model_overrides=numbers)
    found = BACKEND.predict(fused, A5000)
    assert {"fused cudnn attention", "fused cudnn attention backward"} <= {op.name for op in found.ops}
    expected = fused.batch_size * model_size(fused).flops
    assert sum(op.flops for op in found.ops) == pytest.approx(expected, rel=0.15)  # its backward computes scores again


def test_an_estimate_rounds_nothing_and_says_what_it_assumes(recipe, trace):
    found = estimate(trace, recipe, A5000, standard_tools(BACKEND))
    assert found.memory.peak_reserved == found.memory.peak_allocated == trace.peak()[1]
    assert found.memory.context > 0
    assert found.fit_rank is FitRank.SAFE
    assert found.time.step_seconds > 0
    assert any("rough" in note for note in found.notes)


def test_what_was_compiled_is_kept_and_a_damaged_file_is_made_anew(recipe, trace, cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *args, **others: pytest.fail("compiled again"))
        assert BACKEND.predict(recipe, A5000).allocations == trace.allocations
        assert BACKEND.predict(recipe.override(max_steps=7, seed=3), A5000).allocations == trace.allocations
    for path in (cache / "compiled").glob("*.json.gz"):
        path.write_bytes(b"damaged")
    assert BACKEND.predict(recipe, A5000).allocations == trace.allocations


def test_a_compiler_that_ends_its_process_is_an_error_with_its_last_words(tmp_path, monkeypatch):
    done = subprocess.CompletedProcess([], 1, stdout="", stderr="Error of another kind\nFatal: no\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **others: done)
    with pytest.raises(ModelError, match=r"XLA cannot compile this step for RTX A5000: Fatal: no"):
        BACKEND.predict(tiny(tmp_path), A5000)
    assert not list((tmp_path / "compiled").iterdir())


def test_what_a_worker_refuses_is_refused_as_such(cache):
    with pytest.raises(Refused, match="optimizer: adamw-8bit is not in backend: jax"):
        BACKEND.predict(tiny(cache, optimizer="adamw-8bit"), A5000)


def test_a_missing_compiler_is_one_sentence_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(predicting, "PLUGINS", ())
    with pytest.raises(MissingLibrary, match=r"run: pip install jax-cuda12-plugin==\S+ jax-cuda12-pjrt=="):
        BACKEND.predict(tiny(tmp_path), A5000)


def test_a_processor_is_not_planned_for(tmp_path):
    with pytest.raises(Refused, match="planned for GPUs alone"):
        BACKEND.predict(tiny(tmp_path), Device(kind="cpu", name="CPU", memory_bytes=1 << 34))


def test_a_step_that_takes_more_than_jax_takes_of_a_card_says_what_to_set(recipe, trace):
    small = Device(kind="cuda", name="small", memory_bytes=trace.peak()[1] * 10 // 9, capability=(8, 6))
    assert any("XLA_PYTHON_CLIENT_MEM_FRACTION=0.93" in note for note in predicting._notes(trace, small))
    assert not any("FRACTION" in note for note in trace.notes)

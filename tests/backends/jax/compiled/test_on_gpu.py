"""A tiny model's step measured on a CUDA device: its kernels have their places, and few belong to none."""

from __future__ import annotations

import jax
import pytest

from tests.backends.jax.cases import build
from tightfit.backends.jax import assembly
from tightfit.backends.jax.backend import JaxBackend
from tightfit.backends.jax.step import Step
from tightfit.backends.measuring import measure
from tightfit.data import prepare
from tightfit.data.loading import GlobalBatchLoader
from tightfit.model_facts import model_facts
from tightfit.trace import OpClass, Phase

pytestmark = pytest.mark.gpu


def test_kernels_belong_to_instructions_and_memory_is_what_was_planned(monkeypatch):
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU: pip install 'tightfit[jax-cuda]'")
    monkeypatch.setattr(assembly, "compiler_options", lambda flags, devices: {})
    made = build(device="cuda", checkpointing="every-block", attention="eager", precision="bf16")
    step = Step(made)
    data = prepare(made.recipe, model_facts(made.recipe))
    measured = measure(JaxBackend(), step, step.global_batches(GlobalBatchLoader(data.train, made.recipe), 0, 12))
    seconds = {}
    for op in measured.trace.ops:
        seconds[op.phase, op.op_class] = seconds.get((op.phase, op.op_class), 0.0) + op.seconds
    for phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD):
        assert seconds[phase, OpClass.CONTRACTION] > 0
    assert seconds.get((Phase.SETUP, OpClass.OTHER), 0.0) < 0.2 * sum(seconds.values())
    assert 0 < measured.peak_bytes <= step.planned_memory()
    assert any("JAX's allocator" in note for note in measured.trace.notes)

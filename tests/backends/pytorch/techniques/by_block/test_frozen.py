"""Frozen weights that wait in host memory, under adapters and beside layers that are trained, held against the plain
step: the same losses, norms and weights, and nothing frozen that goes back."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.backends.pytorch.techniques.by_block.streaming_cases import (
    ALL,
    COMPILED,
    EVERYTHING,
    FROZEN,
    HALF,
    HOST,
    STREAMED,
    TECHNIQUES,
    UPWARD,
    Run,
    global_batches,
    run,
    same,
    step_of,
)
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.techniques.adapters.layers import frozen_layers, quantized_parts
from tightfit.backends.pytorch.techniques.by_block.streamed_tensors import ALIGNMENT
from tightfit.devices import find_device
from tightfit.recipe import Recipe
from tightfit.trace import COPIES, Stream

BASES: dict[str, dict[str, Any]] = {"as-is": {}, "bf16": {"base": "bf16", "precision": "bf16"},
                                    "fp16": {"base": "fp16", "precision": "fp16"},
                                    "int8": {"base": "int8"}, "nf4": {"base": "nf4"}}
AFTER = {**UPWARD, "update": "after-backward"}
"""Updates behind the backward pass, of what is on the device already."""


@cache
def plain(trained: str, base: str, architecture: str = "llama") -> Run:
    """A run without streaming, made once; its step would stay in memory."""
    return run(architecture, **FROZEN[trained], **BASES[base])._replace(step=None)


@pytest.mark.parametrize("base", [
    pytest.param(name, marks=[pytest.mark.cold] * (name in ("bf16", "fp16", "int8"))) for name in BASES])
@pytest.mark.parametrize("trained", [
    pytest.param(name, marks=[pytest.mark.cold] * (name == "dora")) for name in FROZEN])
def test_streamed_frozen_weights_are_the_plain_ones(trained, base):
    wanted = plain(trained, base)

    assert all(result.grad_norm > 0.05 for result in wanted.results)  # clipping acts
    for kind in (HOST, UPWARD, AFTER, HALF, EVERYTHING):
        assert same(wanted, run("llama", **FROZEN[trained], **BASES[base], **kind))


@pytest.mark.parametrize("base", ["as-is", "nf4"])
def test_transposed_and_tied_weights_stream_frozen(base):
    """GPT-2's layers hold (in, out), and its head is its embedding."""
    for kind in (HOST, EVERYTHING):
        assert same(plain("dora", base, "gpt2"), run("gpt2", **FROZEN["dora"], **BASES[base], **kind))


@pytest.mark.parametrize("technique", [
    "recomputed every-block", "recomputed by tiles", "chunked", "bf16 weights",
    *(pytest.param(name, marks=pytest.mark.cold) for name in ("fp16", "adamw-8bit"))])
@pytest.mark.parametrize("trained", ["lora", "layers"])
def test_every_technique_streams_frozen_weights(trained, technique):
    frozen = {**FROZEN[trained], "base": "nf4", **TECHNIQUES[technique]}

    wanted = run("llama", **frozen)
    for kind in (UPWARD, ALL, EVERYTHING):
        assert same(wanted, run("llama", **frozen, **kind))


@pytest.mark.parametrize(("fields", "alike"), [
    ({}, False), ({"checkpointing": "every-block"}, True),
], ids=["kept", "recomputed"])  # fmt: skip
@pytest.mark.cold
def test_compiled_blocks_stream_frozen_weights(fields, alike):
    frozen = {**FROZEN["lora"], "base": "nf4", **COMPILED, **fields}

    assert same(*(run("llama", 2, alike=alike, **frozen, **kind) for kind in ({}, EVERYTHING)))


def test_evaluation_and_a_step_that_fails_leave_frozen_weights_as_they_are():
    frozen = {**FROZEN["lora"], "base": "nf4"}
    resident, streamed = step_of("llama", **frozen), step_of("llama", **frozen, **UPWARD)
    first, second, held_out = tuple(global_batches("llama", 3))
    for step in (resident, streamed):
        step(first, 1e-2)
    hook = streamed.build.model.model.layers[2].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        streamed(second, 1e-2)
    hook.remove()

    assert streamed.evaluate([held_out]) == resident.evaluate([held_out])
    assert streamed(second, 1e-2).read() == resident(second, 1e-2).read()
    streamed.update.close()
    for (_, one), (_, other) in zip(*(frozen_layers(step.build.model) for step in (resident, streamed)), strict=True):
        assert all(map(torch.equal, quantized_parts(one), quantized_parts(other)))


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_the_model_that_is_written_is_that_of_a_run_without(base, tmp_path):
    """An adapter, and beside it the base that is stored nowhere, dequantized."""
    for folder, kind in (("resident", {}), ("streamed", EVERYTHING)):
        step = run("llama", 2, **FROZEN["lora"], **BASES[base], **kind).step
        step.build.save_model(step.build, tmp_path / folder)

    for name in ("adapter_model.safetensors", "base/model.safetensors", "base/config.json"):
        assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "resident" / name).read_bytes()


def moved(**fields: Any) -> dict[Stream, int]:
    """Bytes that the copies of a step move, either way."""
    step, (first, second) = step_of("llama", **fields), global_batches("llama", 2)
    tracker = Tracker()
    step(first, 1e-3)
    with tracker:
        step(second, 1e-3)
    ops = tracker.trace("measured").ops
    return {stream: sum(op.bytes_read for op in ops if op.stream is stream) for stream in COPIES}


def in_blocks(step: Step) -> int:
    """Bytes of a block's frozen weights, as they are packed."""
    return sum(-(-p.nbytes // ALIGNMENT) * ALIGNMENT for p in step.build.stacks[0][0].parameters()
               if not p.requires_grad)


@pytest.mark.parametrize("kind", [UPWARD, AFTER], ids=["with-forward", "after-backward"])
def test_frozen_weights_come_twice_a_step_and_never_go_back(kind):
    """Two of them are there yet when a pass begins that ended with them."""
    fields = {**FROZEN["lora"], "blocks": 6}
    block = in_blocks(step_of("llama", **fields))

    assert moved(**fields, **kind) == {Stream.COPY_IN: (2 * 6 - 4) * block, Stream.COPY_OUT: 0}


def test_blocks_below_all_that_is_trained_come_for_the_forward_pass_alone():
    fields = {"trainable": {"name": "layers", "names": ["lm_head"]}, "blocks": 6}
    block = in_blocks(step_of("llama", **fields))

    assert moved(**fields, **UPWARD) == {Stream.COPY_IN: 6 * block, Stream.COPY_OUT: 0}


def test_gradients_and_states_that_wait_are_those_of_what_is_trained():
    step = step_of("llama", **FROZEN["lora"])
    learned = sum(p.nbytes for p in step.build.model.parameters() if p.requires_grad)

    assert 3 * learned <= moved(**FROZEN["lora"], **HOST)[Stream.COPY_OUT] < 4 * learned  # a gradient and two states


@pytest.mark.parametrize("trained", FROZEN)
@pytest.mark.parametrize("kind", STREAMED)
def test_a_card_takes_frozen_weights_with_offload(trained, kind):
    recipe = Recipe.from_dict({"model": "llama-3.1-8b", **FROZEN[trained], "base": "nf4", **STREAMED[kind]})

    assert not recipe.refusals(find_device("rtx-4090"))

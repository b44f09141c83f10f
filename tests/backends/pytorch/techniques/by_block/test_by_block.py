"""Blocks streamed from host memory, micro-batches that go through them together, and updates that wait for the next
forward pass, held against the plain step: the same losses, norms and weights."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from tests.architectures import CAUSAL, IMAGES, MASKED, SEQ2SEQ
from tests.backends.pytorch.techniques.by_block.streaming_cases import (
    ALL,
    EVERYTHING,
    FROZEN,
    HALF,
    HOST,
    SPLITS,
    STREAMED,
    SWEEPS,
    TECHNIQUES,
    UPWARD,
    global_batches,
    goes_on,
    learn_late,
    leave_a_block_out,
    run,
    same,
    step_of,
    weights,
)
from tests.plain import CPU
from tightfit.devices import find_device
from tightfit.errors import ModelError
from tightfit.recipe import Recipe

EXACT = ("llama", "mistral", "qwen2", "qwen3", "phi", "gpt_neox", "vit")
"""Models whose gradients are each the sum of one use a micro-batch. Where embedding and head are one, or blocks share
weights, those sums run in another order."""


@cache
def plain_run(architecture):
    """A run as it is without streaming, made once; its step would stay in memory."""
    return run(architecture)._replace(step=None)


@pytest.mark.parametrize(("architecture", "kind"), [
    *((architecture, "sweeps") for architecture in (*CAUSAL, *MASKED, *SEQ2SEQ, *IMAGES)),
    *((architecture, kind) for architecture in ("llama", "albert", "t5") for kind in STREAMED if kind != "sweeps"),
])
def test_streamed_steps_are_the_plain_step(architecture, kind):
    plain, streamed = plain_run(architecture), run(architecture, **STREAMED[kind])

    if architecture in EXACT or "accumulation" not in STREAMED[kind]:
        assert same(plain, streamed)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(streamed.weights[name], weight, rtol=0, atol=1e-4)  # of 3e-3 a step
    assert all(result.grad_norm > 0.05 for result in plain.results)  # clipping acts


@pytest.mark.parametrize("architecture", ["albert", "t5", "vit"])
def test_recomputed_blocks_stream_in_every_kind_of_stack(architecture):
    """T5's blocks hand on the bias of positions that their recomputation needs as it came."""
    plain = run(architecture, checkpointing="every-block")
    streamed = run(architecture, checkpointing="every-block", **SWEEPS)

    for name, weight in plain.weights.items():
        torch.testing.assert_close(streamed.weights[name], weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fields", TECHNIQUES.values(), ids=TECHNIQUES)
def test_every_technique_streams(fields):
    alike = "compile" in fields
    plain = run("llama", alike=alike, **fields)

    for kind in (HOST, HALF, ALL, EVERYTHING):
        assert same(plain, run("llama", alike=alike, **fields, **kind))


def test_skipped_steps_leave_weights_and_states_alone():
    def overflowing(**fields):
        step, found = step_of("llama", precision="fp16", **fields), []
        step.update._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        with step.build.process_settings():
            for batch in global_batches("llama", 24):
                found.append(step(batch, 1e-3).read())
            step.update.flush()
        return found, weights(step)

    (plain, wanted), (streamed, got) = overflowing(), overflowing(**SWEEPS)

    assert any(result.skipped for result in plain)
    assert not all(result.skipped for result in plain)
    assert [repr(result) for result in streamed] == [repr(result) for result in plain]
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("fields", [{}, {"optimizer": "adamw-8bit"}, {"precision": "bf16-pure"}], ids=str)
@pytest.mark.parametrize("kind", ["both", "sweeps", "half", "everything"])
def test_updates_within_the_backward_pass_are_the_plain_ones(fields, kind):
    plain = run("llama", **fields, max_grad_norm=0)

    assert same(plain, run("llama", **fields, **{**STREAMED[kind], "update": "in-backward"}, max_grad_norm=0))


def test_updates_within_the_backward_pass_hold_one_blocks_gradients():
    def most_held(update):
        step, held = step_of("llama", accumulation="by-block", update=update, max_grad_norm=0), []
        put = step.update.store_gradients

        def counted(part, final):
            put(part, final)
            bound = sum(any(p.grad is not None for p in layer.parameters()) for layer in step.build.model.model.layers)
            held.append(bound + len(step.update._offloaded._resident))

        step.update.store_gradients = counted
        step(next(global_batches("llama")), 1e-3)
        return max(held)

    assert most_held("in-backward") <= 1
    assert most_held("with-forward") > 1


@pytest.mark.parametrize("kind", ["both", "sweeps", "everything"])
def test_gradients_summed_in_fp32_are_nearer_to_the_true_sum(kind):
    def gradients(sums, precision="bf16-pure", **fields):
        step = step_of("llama", precision=precision, **fields,
                       accumulation={"name": "by-block", "gradient_sums": sums}, max_grad_norm=0)
        found = {}
        step.update.store_gradients = lambda part, final: found.update(
            {name: p.grad.double() for name, p in step.build.model.named_parameters() if p.grad is not None})
        step.accumulate([*global_batches("llama", 4)][-1])
        return {name: gradient for name, gradient in found.items() if "layers" in name}

    exact = gradients("weights", "fp32")
    fields = {key: value for key, value in STREAMED[kind].items() if key != "accumulation"}
    wide, narrow = gradients("fp32", **fields), gradients("weights", **fields)
    errors = [sum(float((found[name] - exact[name]).square().sum()) for name in exact) for found in (wide, narrow)]

    assert errors[0] < errors[1]


@pytest.mark.parametrize(("fields", "kind"), [
    *product(({}, {"optimizer": "adamw-8bit"}), (HOST, HALF)),
    *(({**FROZEN["lora"], "base": "int8"}, kind) for kind in (HOST, UPWARD)),
], ids=str)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(fields, kind, tmp_path):
    whole = run("llama", **fields)
    results, found = goes_on(*(step_of("llama", **fields, **kind) for _ in range(2)), tmp_path)

    assert results == whole.results[2:]
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in found.items())


def test_a_checkpoint_of_a_plain_run_goes_on_streamed(tmp_path):
    plain, streamed = step_of("llama"), step_of("llama", **HOST)
    first, second = tuple(global_batches("llama", 2))
    plain(first, 1e-3)
    streamed.load(tmp_path, plain.save(tmp_path))

    assert streamed(second, 1e-3).read() == plain(second, 1e-3).read()
    streamed.update.flush()
    assert all(torch.equal(weight, weights(plain)[name]) for name, weight in weights(streamed).items())


def test_evaluation_and_finiteness_see_the_updated_weights():
    plain, streamed = step_of("llama"), step_of("llama", **HOST)
    first, held_out = tuple(global_batches("llama", 2))
    before = streamed.evaluate([held_out])
    for step in (plain, streamed):
        step(first, 1e-2)

    assert streamed.evaluate([held_out]) == plain.evaluate([held_out]) != before
    assert streamed.is_finite()


def test_evaluation_brings_the_head_once():
    step, entered = step_of("llama", loss="chunked", **EVERYTHING), []
    make_ready = step.update.make_ready
    step.update.make_ready = lambda part, next_part: entered.append(part) or make_ready(part, next_part)
    step.evaluate(global_batches("llama", 1))

    assert entered.count(step.blocks.parts.head) == len(SPLITS[0])


def test_dropout_is_drawn_and_a_seed_repeats_it():
    def losses(rate: float) -> list[float]:
        step = step_of("llama", **HOST)
        for module in step.build.model.modules():
            if hasattr(module, "attention_dropout"):
                setattr(module, "attention_dropout", rate)  # noqa: B010 - a module's attribute has no other type
        torch.manual_seed(0)
        return [step(batch, 1e-2).read().loss.sum for batch in global_batches("llama")]

    assert losses(0.3) == losses(0.3) != losses(0.0)


@pytest.mark.parametrize("kind", ["with-forward", "sweeps", "half", "everything"])
@pytest.mark.parametrize("before", [leave_a_block_out, learn_late])
def test_what_some_steps_leave_out_learns_from_the_others(kind, before):
    plain, streamed = (run("llama", 6, before, **fields) for fields in ({}, STREAMED[kind]))

    assert all(torch.equal(streamed.weights[name], plain.weights[name]) for name in plain.weights)


@pytest.mark.parametrize("kind", ["plain", *STREAMED])
@pytest.mark.parametrize("backward", [False, True])
def test_a_step_that_fails_leaves_no_trace(kind, backward):
    def fail(*_):  # in the second micro-batch: the first one's gradients may be there
        if not micro_batches.pop():
            raise KeyError("a block's own")

    micro_batches = [0, 1]
    plain, failing = (step_of("llama", **fields) for fields in ({}, STREAMED.get(kind, {})))
    batches = [*global_batches("llama")]
    failing(batches[0], 1e-3)
    block = failing.build.model.model.layers[2]
    hook = (block.register_full_backward_pre_hook if backward else block.register_forward_pre_hook)(fail)
    with pytest.raises((ModelError, KeyError)):
        failing(batches[1], 1e-3)
    hook.remove()
    assert all(parameter.grad is None for parameter in failing.build.model.parameters())

    plain(batches[0], 1e-3)
    assert failing.evaluate([batches[2]]) == plain.evaluate([batches[2]])
    assert failing(batches[2], 1e-3).read() == plain(batches[2], 1e-3).read()
    failing.update.flush()
    assert all(torch.equal(weight, weights(plain)[name]) for name, weight in weights(failing).items())


def test_whether_gradients_are_finite_is_read_once_a_step(monkeypatch):
    step, read = step_of("llama", precision="fp16", **SWEEPS), []
    item = torch.Tensor.item
    step.accumulate(next(global_batches("llama")))
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: read.append(tensor) or item(tensor))
    step.update()

    assert len(read) == 1


def test_micro_batches_that_call_blocks_in_different_orders_are_refused_by_name():
    step = step_of("llama", accumulation="by-block")
    layers, calls = step.build.model.model.layers, []
    reordered = layers[::-1]
    inner = step.build.model.model.forward

    def forward(*args, **kwargs):
        calls.append(0)
        step.build.model.model.layers = reordered if len(calls) == 3 else layers
        return inner(*args, **kwargs)

    step.build.model.model.forward = forward
    with pytest.raises(ModelError, match="accumulation=loop"):
        step(next(global_batches("llama")), 1e-3)
    assert not torch.is_autocast_enabled("cpu")


def test_a_tensor_from_outside_the_blocks_that_is_used_again_is_refused_by_name():
    step = step_of("llama", accumulation="by-block")
    model = step.build.model.model
    made: list[torch.Tensor] = []
    model.embed_tokens.register_forward_hook(lambda module, given, output: made.append(output))
    model.norm.register_forward_pre_hook(lambda module, given: (given[0] + made.pop(0),))
    with pytest.raises(ModelError, match=r"one tensor from outside of its blocks.*accumulation=loop"):
        step(next(global_batches("llama")), 1e-3)


@pytest.mark.parametrize(("fields", "named"), [
    ({"accumulation": "by-block", "compile": "whole"}, "compile"),
    ({"update": "with-forward", "compile": "whole"}, "compile"),
    ({"offload": "host", "device": "cpu"}, "offload"),
    ({"offload": "host", "accumulation": "loop"}, "accumulation"),
    ({"accumulation": "by-block", "checkpointing": "segments"}, "checkpointing"),
    ({"accumulation": "by-block", "parallel": "dp"}, "parallel"),
])
def test_what_cannot_stream_is_refused_by_name(fields, named):
    recipe = Recipe.from_dict({"model": "tiny", **fields})
    device = CPU if "device" in fields else find_device("a100-80gb-sxm")

    assert any(f"{named}=" in reason for reason in recipe.refusals(device))

"""Deep models are predicted from shallow traces, whatever the optimizer and the compiler do, as from whole ones."""

from __future__ import annotations

from functools import partial

import pytest
from torch._inductor import compile_fx

from tests.architectures import tiny_model
from tests.plain import CPU
from tests.trace.test_extension import recipe as of_four
from tightfit.backends.pytorch.simulate import predict as prediction
from tightfit.devices import find_device
from tightfit.trace import Trace

GPU = find_device("rtx-4090")
DEPTHS = {
    "gpt2": ("n_layer",), "t5": ("num_layers", "num_decoder_layers"), "bart": ("encoder_layers", "decoder_layers"),
}
EVERY_OTHER = "moe-tiny"
"""A model that has experts in every other block."""
GROUPS = 7
"""Of blocks: one more than the deepest of the traces that stand for them."""
FOREACH = {"name": "adamw", "implementation": "foreach"}


recipe = partial(of_four, batch_size=2)


def described(trace: Trace) -> list[object]:
    """A trace without its ticks, which count differently where unlike things happen between events."""
    allocations = [(a.op, a.module, a.bytes, a.category, a.dtype) for a in trace.allocations]
    ops = [(o.name, o.module, o.phase, o.op_class, o.flops, o.bytes_read, o.bytes_written) for o in trace.ops]
    peaks = [(s.name, s.step, trace.peak(s.start, s.stop)[1]) for s in trace.spans]
    return [allocations, ops, peaks]


@pytest.mark.parametrize(("name", "device", "changes"), [
    ("gpt2", GPU, {"optimizer": FOREACH, "precision": "bf16"}),
    pytest.param("gpt2", CPU, {"optimizer": "adamw-8bit"}, marks=pytest.mark.cold),
    pytest.param("t5", GPU, {"optimizer": "sgd"}, marks=pytest.mark.cold),
    pytest.param("bart", GPU, {"compile": "per-block"}, marks=pytest.mark.cold),
    pytest.param("gpt2", GPU, {"parallel": {"name": "fsdp", "processes": 2}, "checkpointing": "every-block",
                               "precision": "bf16"}, marks=pytest.mark.cold),
    ("gpt2", GPU, {"offload": {"name": "host", "weights": 0, "gradients": 0}, "precision": "fp16"}),
    ("gpt2", GPU, {"parallel": {"name": "fsdp", "processes": 2, "reshard": False}, "compile": "per-block"}),
    pytest.param(EVERY_OTHER, CPU, {"precision": "bf16", "checkpointing": "every-block"}, marks=pytest.mark.cold),
    (EVERY_OTHER, GPU, {"accumulation": "by-block"}),
], ids=lambda value: str(value)[:40])
def test_few_blocks_tell_the_rest(name, device, changes, monkeypatch):
    if changes.get("optimizer") == "adamw-8bit":
        pytest.importorskip("torchao")
    if name == EVERY_OTHER:
        bundled = {"model": name, "model_overrides": {"num_hidden_layers": 2 * GROUPS, "hidden_size": 32}}
        asked, model = recipe("gpt2", **bundled, **changes), None
    else:
        blocks = GROUPS + 2 * (name == "t5")  # whose first block, with the positions' biases, is unlike the others
        asked, model = recipe(name, **changes), tiny_model(name, **dict.fromkeys(DEPTHS[name], blocks))
    monkeypatch.setattr(prediction, "FEWEST_GROUPS", GROUPS)
    whole = prediction.predict(asked, device, model, whole=True)
    shortened: list[bool] = []
    original = prediction._traced

    def counted(recipe, device, model, regions, shorten=None, **options):
        shortened.append(shorten is not None)
        return original(recipe, device, model, regions, shorten, **options)

    monkeypatch.setattr(prediction, "_traced", counted)
    quick = prediction.predict(asked, device, model)
    assert shortened == [True, True]
    assert described(quick) == described(whole)


def test_what_one_trace_compiles_serves_the_deeper_one(monkeypatch):
    compiled: list[str] = []
    original = compile_fx.compile_fx

    def counted(module, inputs, **options):
        compiled.append(module.code)
        return original(module, inputs, **options)

    monkeypatch.setattr(compile_fx, "compile_fx", counted)
    asked, model = recipe("gpt2", compile="per-block"), tiny_model("gpt2", n_layer=10)
    prediction.predict(asked, GPU, model)
    assert len(compiled) == 2  # a block and the loss in training, for both traces together


def test_dropout_in_compiled_and_checkpointed_blocks_is_predicted_for_a_gpu():
    """The compiler keeps the random state of what it recomputes, by an op that has a rule of its own."""
    model = tiny_model("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    asked = recipe("gpt2", compile="per-block", checkpointing="every-block")
    trace = prediction.predict(asked, GPU, model)
    assert any(op.name.startswith("fused") for op in trace.ops)
    assert not any(a.shape == (5056,) for a in trace.allocations)  # the CPU's own, which no GPU holds

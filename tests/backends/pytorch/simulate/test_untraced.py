"""What no trace shows: sizes by the rules of torch's source, and by the recipe's own arithmetic."""

from __future__ import annotations

import json

import pytest

from tightfit.backends.cuda_context import assumed
from tightfit.backends.pytorch.simulate import untraced as module
from tightfit.backends.pytorch.simulate.predict import predict
from tightfit.backends.pytorch.simulate.untraced import untraced, workspace_bytes
from tightfit.devices import Device, catalogue, find_device
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.trace import Op, OpClass, Phase, Span, Trace

A100, H100, B200, RTX_5090 = map(find_device, ("a100-80gb-sxm", "h100-sxm", "b200", "rtx-5090"))
CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 34)
SMALL, WIDE = (4096 * 2 + 16 * 8) * 1024, 32 << 20
TINY = {
    "model": "gpt2", "model_overrides": {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64}, "vocab_size": 512,
    "seq_len": 64, "batch_size": 4, "micro_batch_size": 2, "data": {"source": "dummy"}, "compile": "off",
    "checkpointing": "none", "precision": "bf16", "optimizer": "adamw", "attention": "sdpa",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch, tmp_path):
    (tmp_path / "none.json").write_text("{}")
    monkeypatch.setattr(module, "CONTEXT_RECORDS", tmp_path / "none.json")


def traced(*ops: tuple[str, Phase], op_class: OpClass = OpClass.CONTRACTION) -> Trace:
    made = [Op(name=name, tick=n, phase=phase, op_class=op_class) for n, (name, phase) in enumerate(ops)]
    return Trace(origin="predicted", ops=made, spans=[Span(name=n, start=0, stop=9) for n in ("step 1", "step 2")])


def sizes(trace: Trace, device: Device = A100, where: str = "allocator") -> list[int]:
    return [u.bytes for u in untraced(Recipe(), device, trace) if u.where == where]


@pytest.mark.parametrize(("device", "expected"), [(A100, SMALL), (H100, WIDE), (B200, WIDE), (RTX_5090, WIDE)])
def test_cublas_workspaces_by_capability(device, expected):
    assert workspace_bytes(device) == expected


def test_each_thread_that_multiplies_has_a_workspace():
    forward, backward = ("aten.mm.default", Phase.FORWARD), ("aten.mm.default", Phase.BACKWARD)
    assert sizes(traced(forward)) == sizes(traced(backward)) == [SMALL]
    assert sizes(traced(forward, backward), H100) == [WIDE, WIDE]
    assert sizes(traced(("aten.bmm.default", Phase.RECOMPUTE), ("aten.bmm.default", Phase.DECODE))) == [SMALL] * 2
    fused = ("aten._scaled_dot_product_flash_attention.default", "torch_attn._varlen_attn.default",
             "aten.convolution.default")
    assert sizes(traced(*((name, Phase.FORWARD) for name in fused))) == []
    assert sizes(traced(forward, op_class=OpClass.ELEMENTWISE)) == []


def test_a_workspace_is_born_with_its_threads_first_product():
    trace = traced(("aten.mm.default", Phase.FORWARD), ("aten.mm.default", Phase.FORWARD),
                   ("aten.convolution_backward.default", Phase.BACKWARD), ("aten.mm.default", Phase.RECOMPUTE))
    assert [u.born for u in untraced(Recipe(), A100, trace) if u.where == "allocator"] == [0, 3]


def test_a_product_with_a_bias_has_a_workspace_of_its_own():
    trace = traced(("aten.mm.default", Phase.FORWARD), ("aten.addmm.default", Phase.FORWARD))
    assert sizes(trace) == [SMALL, 1 << 20]


def test_the_cpu_has_nothing_unseen():
    assert untraced(Recipe(), CPU, traced(("aten.mm.default", Phase.FORWARD))) == []


def test_an_assumed_context_says_so_and_leaves_room_on_every_card():
    for device in catalogue():
        context = [u for u in untraced(Recipe(), device, traced()) if u.where == "context"]
        assert all("not yet measured" in u.source for u in context)
        assert 0 < sum(u.bytes for u in context) < device.memory_bytes / 4


RECORD = {"step": 500 << 20, "compiled": 520 << 20, "date": "2026-01-02", "torch": "2.11.0", "driver": "580.1"}


def test_a_measured_context_takes_the_place_of_the_assumed_one(monkeypatch, tmp_path):
    (tmp_path / "contexts.json").write_text(json.dumps({"NVIDIA A100-SXM4-80GB": RECORD}))
    monkeypatch.setattr(module, "CONTEXT_RECORDS", tmp_path / "contexts.json")
    eager, compiled = Recipe.from_dict({"compile": "off"}), Recipe.from_dict({"compile": "per-block"})
    for recipe, size in ((eager, RECORD["step"]), (compiled, RECORD["compiled"])):
        (context,) = [u for u in untraced(recipe, A100, traced()) if u.where == "context"]
        assert context.bytes == size
        for part in ("measured", "A100-SXM4", "2026-01-02", "580.1"):
            assert part in context.source
    assert sizes(traced(), H100, "context") == [figure.bytes for figure in assumed(H100)]


def test_a_predicted_step_carries_what_it_does_not_show():
    recipe = resolve(Recipe.from_dict({**TINY, "loading": {"workers": 2, "prefetch": 3}}), A100)
    trace = predict(recipe, A100)
    found = {u.name: u for u in trace.untraced}
    assert [u.where for u in trace.untraced].count("context") == 2
    assert found["cuBLAS workspace of the main thread"].bytes == SMALL
    assert found["cuBLAS workspace of autograd's thread"].bytes == SMALL
    tensor = 2 * 64 * 8  # ids and labels of a micro-batch, 64-bit integers
    assert found["prefetched global batches"].bytes == (2 * 3 + 1) * 2 * (2 * tensor)


def test_global_batches_that_are_not_page_locked_are_not_rounded():
    values = {**TINY, "seq_len": 60, "loading": {"workers": 0, "pin_memory": False}}
    trace = predict(resolve(Recipe.from_dict(values), A100), A100)
    (global_batches,) = [u for u in trace.untraced if u.name == "prefetched global batches"]
    assert global_batches.bytes == 2 * (2 * 2 * 60 * 8)

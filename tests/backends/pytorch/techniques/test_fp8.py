"""fp8: how near its products are to bf16's, which layers have them, and that everything else works beside them."""

from __future__ import annotations

import copy
import itertools
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.architectures import TASK_OF, tiny_model
from tests.backends.pytorch.techniques.by_block.streaming_cases import ALL, BY_BLOCK, HOST, run, same, weights
from tests.plain import CPU, PLAIN
from tightfit.backends.pytorch.assembly import assemble
from tightfit.backends.pytorch.own_loop import apply
from tightfit.backends.pytorch.simulate.predict import predict
from tightfit.backends.pytorch.techniques import fp8_layers
from tightfit.devices import Device, find_device
from tightfit.errors import ModelError, RecipeError, Refused
from tightfit.planning.defaults import resolve
from tightfit.planning.search.space import Space
from tightfit.recipe import Recipe

ROWWISE: dict[str, Any] = {"name": "fp8", "scaling": "rowwise"}
BF16_WEIGHTS: dict[str, Any] = {"name": "fp8", "weights": "bf16"}
FORMS: dict[str, Any] = {"tensorwise": "fp8", "rowwise": ROWWISE, "bf16 weights": BF16_WEIGHTS}
each_form = pytest.mark.parametrize("precision", [
    pytest.param(form, id=name, marks=[pytest.mark.cold] * (name == "rowwise")) for name, form in FORMS.items()])


def decibels(exact: Tensor, other: Tensor) -> float:
    """Signal-to-noise ratio of a tensor against the exact one."""
    exact, other = exact.detach().double(), other.detach().double()
    return float(20 * torch.log10(exact.norm() / (exact - other).norm()))


@pytest.mark.parametrize(("kind", "sides"), [(nn.Linear, (64, 48)), (Conv1D, (48, 64))], ids=["Linear", "Conv1D"])
@pytest.mark.parametrize(("scaling", "floors"), [("tensorwise", (24, 21)), ("rowwise", (24, 23))])
@pytest.mark.parametrize("tokens", [32, 27])
@pytest.mark.parametrize("emulated", [False, True])
def test_products_are_near_those_of_bf16(kind, sides, scaling, floors, tokens, emulated):
    torch.manual_seed(0)
    plain = nn.Sequential(kind(*sides))
    fp8 = copy.deepcopy(plain)
    assert fp8_layers.convert([fp8], scaling, emulated=emulated) == (1, 0)
    inputs = torch.randn(2, tokens, 64)
    found = []
    for model in (plain, fp8):
        values = inputs.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(values)
        output.float().square().sum().backward()
        found.append((output, values.grad, model[0].weight.grad, model[0].bias.grad))

    assert found[1][0].dtype == torch.bfloat16
    assert {gradient.dtype for gradient in found[1][1:]} == {torch.float32}
    assert all(a.shape == b.shape for a, b in zip(*found, strict=True))
    ratios = [decibels(a, b) for a, b in zip(*found, strict=True)]
    assert ratios[0] > floors[0]
    assert min(ratios[1:]) > floors[1]
    assert max(ratios) < 50, "nothing was multiplied in fp8"


def test_layers_that_do_not_fit_are_left_out():
    class Odd(nn.Linear):
        """A layer of another class, which may do something of its own."""

    block = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 24), nn.Linear(24, 32), Odd(32, 32), nn.LayerNorm(32))

    assert fp8_layers.convert([block], "tensorwise", emulated=True) == (1, 2)
    assert [type(layer) for layer in block] == [fp8_layers.Fp8Linear, nn.Linear, nn.Linear, Odd, nn.LayerNorm]


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert", "t5", "vit"])
def test_layers_of_blocks_multiply_in_fp8_and_no_others(architecture):
    recipe = resolve(Recipe.from_dict({"task": TASK_OF[architecture], "precision": "fp8", "device": "cpu"}), CPU)
    model = tiny_model(architecture)
    names = [name for name, _ in model.named_parameters()]
    build = assemble(recipe, CPU, torch.device("cpu"), model)
    inside = {module for stack in build.stacks for block in stack for module in block.modules()}
    in_fp8 = {module for module in build.model.modules() if type(module) in fp8_layers.CLASSES.values()}

    assert in_fp8 == {module for module in inside if isinstance(module, nn.Linear | Conv1D)}
    assert [name for name, _ in build.model.named_parameters()] == names
    assert any("emulates" in note for note in build.notes)


def test_a_model_without_such_layers_is_refused():
    recipe = resolve(Recipe.from_dict({"task": "causal-lm", "precision": "fp8", "device": "cpu"}), CPU)
    odd = {"hidden_size": 24, "intermediate_size": 40, "head_dim": 6}
    with pytest.raises(Refused, match=r"precision: fp8 .* LlamaForCausalLM have none; write precision=bf16"):
        assemble(recipe, CPU, torch.device("cpu"), tiny_model("llama", **odd))


@pytest.mark.parametrize(("capability", "scaling", "served"), [
    ((8, 0), "tensorwise", False), ((8, 6), "rowwise", False), ((8, 9), "tensorwise", True), ((8, 9), "rowwise", True),
    ((9, 0), "rowwise", True), ((12, 0), "tensorwise", True),
])
def test_cards_without_fp8_products_are_named(capability, scaling, served):
    device = replace(CPU, kind="cuda", name="this card", capability=capability)
    reasons = Recipe.from_dict({"precision": {"name": "fp8", "scaling": scaling}}).refusals(device)
    assert reasons == [] if served else "8.9" in reasons[0] and "write precision=bf16" in reasons[0]


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_formats_that_are_not_to_be_had_say_why(name):
    with pytest.raises(RecipeError, match=f"precision: '{name}' .*torchao.*; write precision=fp8"):
        Recipe.from_dict({"precision": name})


def test_a_torchao_that_lacks_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, fp8_layers.__name__, None)
    monkeypatch.delattr("tightfit.backends.pytorch.techniques.fp8_layers")
    recipe = resolve(Recipe.from_dict({"task": "causal-lm", "precision": "fp8", "device": "cpu"}), CPU)
    with pytest.raises(ModelError, match=r"precision: this version of torchao .*pip install"):
        assemble(recipe, CPU, torch.device("cpu"), tiny_model("llama"))


def test_it_trains_and_only_weights_in_bf16_are_bf16():
    usual = run("llama", precision="bf16").results[-1].loss.mean
    for precision, dtype in (("fp8", torch.float32), (BF16_WEIGHTS, torch.bfloat16)):
        found = run("llama", precision=precision)
        assert {weight.dtype for weight in found.weights.values()} == {dtype}
        assert found.results[-1].loss.mean == pytest.approx(usual, abs=0.01)


@each_form
def test_block_by_block_is_the_plain_step_bit_for_bit(precision):
    plain = run("llama", blocks=2, precision=precision)  # of other depths, other formats tell
    for fields in (BY_BLOCK, HOST, {**ALL, "checkpointing": "every-block"}):
        assert same(plain, run("llama", blocks=2, precision=precision, **fields))


def test_updates_in_the_backward_pass_are_those_of_the_plain_step():
    fields = {"precision": "fp8", "max_grad_norm": 0.0}
    assert same(run("llama", **fields), run("llama", **fields, **{**HOST, "update": "in-backward"}))


@pytest.mark.parametrize(("form", "kinds"), [
    ("tensorwise", ("every-block", "every-nth", "segments", "mlp", "attention", "selective",
                    {"name": "selective", "keep": "attention"}, {"name": "selective", "keep": "every-other-matmul"})),
    ("rowwise", ("every-block", "selective")), ("bf16 weights", ("every-block", "selective"))])
def test_recomputation_is_exact(form, kinds):
    plain = run("llama", 2, alike=True, precision=FORMS[form])  # each new shape costs time in fp8 on a processor
    for kind in kinds:
        assert same(plain, run("llama", 2, alike=True, precision=FORMS[form], checkpointing=kind)), kind


@pytest.mark.cold
def test_compiled_recomputed_and_from_host_memory_it_is_the_same_up_to_rounding():
    compiled = {"compile": {"name": "per-block", "backend": "aot_eager"}, "checkpointing": "every-block", **HOST}
    plain, found = (run("llama", 1, alike=True, precision="fp8", **more) for more in ({}, compiled))
    assert plain.results[0].loss.mean == pytest.approx(found.results[0].loss.mean, abs=2e-3)


def test_the_loss_in_chunks_is_that_of_whole_logits():
    whole, chunked = (run("llama", 2, precision="fp8", loss=loss) for loss in ("plain", "chunked"))
    for a, b in zip(whole.results, chunked.results, strict=True):
        assert a.loss.mean == pytest.approx(b.loss.mean, abs=2e-3)


def test_a_run_goes_on_from_its_checkpoint_in_fp8_or_without(tmp_path):
    first = run("llama", 2, precision="fp8")
    meta = first.step.save(tmp_path)
    for precision in ("fp8", "bf16"):
        step = run("llama", 1, precision=precision).step
        step.load(tmp_path, meta)
        assert all(torch.equal(weight, first.weights[name]) for name, weight in weights(step).items())


def test_the_exported_model_is_an_ordinary_one(tmp_path):
    found = run("llama", 1, precision="fp8")
    found.step.export(tmp_path, None)
    exported = type(found.step.build.model).from_pretrained(tmp_path)
    assert {type(m) for m in exported.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    assert all(torch.equal(p, found.weights[name]) for name, p in exported.named_parameters())


def test_accelerate_gets_bf16_around_it():
    recipe = {**PLAIN, "precision": "fp8", "device": "cpu", "batch_size": 4, "micro_batch_size": 2,
              "attention": "eager"}
    applied = apply(tiny_model("llama"), recipe)
    assert applied.accelerator_kwargs["mixed_precision"] == "bf16"
    assert any("dtype=torch.bfloat16" in sentence for sentence in applied.left_to_you)


H100, A100 = find_device("h100-sxm"), find_device("a100-80gb-sxm")
PLANNED: dict[str, Any] = {
    "model": "llama-3.2-1b", "seq_len": 2048, "batch_size": 4, "micro_batch_size": 4, "attention": "sdpa",
    "model_overrides": {"num_hidden_layers": 2}, "optimizer": "adamw", "loss": "chunked", "checkpointing": "none",
    "data": {"source": "dummy", "eval_fraction": 0},
}


def planned(**fields: Any) -> tuple[int, dict[str, float]]:
    """Peak bytes of a plan, and its FLOPs by format."""
    trace = predict(resolve(Recipe.from_dict({**PLANNED, **fields}), H100), H100)
    flops = sorted((op.dtype, op.flops * times) for op, times in trace.step_ops() if op.flops)
    return trace.peak()[1], {dtype: sum(count for _, count in same)
                             for dtype, same in itertools.groupby(flops, key=lambda pair: pair[0])}


@pytest.mark.parametrize("compiled", ["off", pytest.param("per-block", marks=pytest.mark.cold)])
def test_plans_have_its_flops_by_format_and_its_memory(compiled):
    (usual, in_bf16), (smaller, in_fp8) = (planned(precision=p, compile=compiled) for p in ("bf16", "fp8"))

    assert sum(in_fp8.values()) == pytest.approx(sum(in_bf16.values()))
    assert in_fp8["float8_e5m2"] == pytest.approx(2 * in_fp8["float8_e4m3fn"])
    assert in_fp8["bfloat16"] < in_bf16["bfloat16"] - in_fp8["float8_e5m2"]
    assert smaller < usual


def test_auto_considers_it_where_numerics_may_change_and_the_card_has_it():
    def offered(device: Device, **fields: Any) -> set[tuple[str, str]]:
        space = Space(Recipe.from_dict({"model": "llama-3.2-1b", **fields}), device)
        found = [space.recipe_for(each, 1).precision for each in space.combinations]
        return {(p.name, getattr(p, "weights", "")) for p in found}

    assert {("fp8", "fp32"), ("fp8", "bf16")} <= offered(H100, allow_numerics=True)
    for device, fields in ((H100, {}), (A100, {"allow_numerics": True}),
                           (H100, {"allow_numerics": True, "mode": "inference"})):
        assert "fp8" not in {name for name, _ in offered(device, **fields)}

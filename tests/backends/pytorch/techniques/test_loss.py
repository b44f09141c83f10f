"""Chunked cross-entropy has the plain loss's gradients, whatever a model does to its logits; what it cannot serve is
refused by name."""

from __future__ import annotations

import dataclasses
import gc
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from tests.architectures import CAUSAL, MASKED, SEQ2SEQ, TASK_OF, VOCAB, tiny_config, tiny_model
from tests.backends.test_exactness import DTYPES, ROWS, Wide, micro_batches, worst
from tests.built import built
from tests.own_models import Scores
from tightfit import apply, plan
from tightfit.backends.measuring import measure
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import tensor_global_batch
from tightfit.backends.pytorch.simulate.predict import predict
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.techniques.loss.chunked_cross_entropy import chunked_cross_entropy
from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, MicroBatch, global_batch_of
from tightfit.techniques.loss import CHUNK_BYTES, Chunked, Plain

SMALL = {"name": "chunked", "tokens": 7}
LIMITS = {"fp64": 1e-12, "fp32": 1e-6}
_LLAMA_LIKE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 40, "pad_token_id": 0}
CHANGED_LOGITS = {
    "gemma2 softcapped": ("Gemma2Config", {"final_logit_softcapping": 1.5, "head_dim": 8}),
    "cohere multiplied": ("CohereConfig", {"logit_scale": 0.3}),
    "granite divided": ("GraniteConfig", {"logits_scaling": 3.0}),
}


def changed_model(name: str) -> nn.Module:
    config, numbers = CHANGED_LOGITS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**_LLAMA_LIKE, **numbers})
    return transformers.AutoModelForCausalLM.from_config(made)


def packed_rows() -> MicroBatch:
    """Two rows of documents that share them."""
    random = np.random.default_rng(0)
    ids = random.integers(4, VOCAB, (2, 24))
    documents = np.repeat(np.array([[0, 1, 2], [0, 0, 1]], dtype=np.int32), 8, axis=1)
    starts = np.diff(documents, axis=1, prepend=-1) != 0
    positions = np.arange(24) - np.maximum.accumulate(np.where(starts, np.arange(24), 0), axis=1)
    labels = np.where(np.roll(starts, -1, axis=1), IGNORE, np.roll(ids, -1, axis=1))
    return MicroBatch(inputs={"input_ids": ids, "position_ids": positions}, labels=labels, mask="packed",
                      document_ids=documents)


def step_of(model: nn.Module, task: str, loss: object, **changes: object) -> Step:
    return Step(built({
        "task": task, "micro_batch_size": 2, "batch_size": ROWS, "max_grad_norm": 0.0, "data": "dummy", "device": "cpu",
        "seq_len": 40, "loss": loss, **changes,
    }, model))


def learned(step: Step, task: str, packed: bool = False) -> tuple[dict[str, torch.Tensor], float]:
    """The gradients of a global batch of three micro-batches, and its mean loss."""
    global_batch = global_batch_of((packed_rows(),) if packed else micro_batches(task, (2, 2, 2)))
    wide = next(step.build.model.parameters()).dtype == torch.float64
    with Wide() if wide else torch.enable_grad():
        total = step.accumulate(tensor_global_batch(global_batch))
    found = {n: p.grad.clone() for n, p in step.build.model.named_parameters() if p.grad is not None}
    return found, total.item() / global_batch.count


def assert_alike(model: object, task: str, bits: str, packed: bool = False, **changes: object) -> None:
    found = [learned(step_of(model().to(DTYPES[bits]), task, loss, **changes), task, packed)  # type: ignore[operator]
             for loss in ("plain", SMALL)]
    (plain, expected), (chunked, loss) = found
    assert loss == pytest.approx(expected, rel=10 * LIMITS[bits])
    assert worst(plain, chunked) <= LIMITS[bits]


@pytest.mark.parametrize("bits", DTYPES)
@pytest.mark.parametrize("name", [*CAUSAL, *MASKED, *SEQ2SEQ])
def test_gradients_are_the_plain_losses(name, bits):
    assert_alike(lambda: tiny_model(name), TASK_OF[name], bits)


@pytest.mark.parametrize("bits", DTYPES)
@pytest.mark.parametrize("name", CHANGED_LOGITS)
def test_gradients_through_what_a_model_does_to_its_logits(name, bits):
    assert_alike(lambda: changed_model(name), "causal-lm", bits)


@pytest.mark.parametrize(("name", "task", "packed", "changes"), [
    ("gpt2", "causal-lm", True, {}),
    ("llama", "causal-lm", True, {"checkpointing": "every-block"}),
    ("llama", "causal-lm", False, {"pad_vocab_to": 64}),
    ("gemma2 softcapped", "causal-lm", False, {"pad_vocab_to": 64}),
    ("bert", "masked-lm", False, {"pad_vocab_to": 64}),
    ("bart", "seq2seq", False, {"pad_vocab_to": 64}),
    ("gpt2", "causal-lm", False, {"compile": {"name": "per-block", "backend": "aot_eager"}}),
    ("gpt2", "causal-lm", True, {"label_smoothing_factor": 0.3}),
    ("gemma2 softcapped", "causal-lm", False, {"pad_vocab_to": 64, "label_smoothing_factor": 0.3}),
    pytest.param("gemma2 softcapped", "causal-lm", True, {"compile": {"name": "whole", "backend": "aot_eager"}},
                 marks=pytest.mark.cold),
], ids=str)  # fmt: skip
def test_gradients_with_other_techniques(name, task, packed, changes):
    make = (lambda: changed_model(name)) if name in CHANGED_LOGITS else (lambda: tiny_model(name))
    assert_alike(make, task, "fp32", packed, **changes)


@pytest.mark.parametrize("loss", ["plain", SMALL], ids=["plain", "chunked"])
@pytest.mark.parametrize(("name", "task", "changes"), [
    ("gpt2", "causal-lm", {}), ("gpt2", "causal-lm", {"label_smoothing_factor": 0.3}),
    ("gemma2 softcapped", "causal-lm", {"pad_vocab_to": 64, "label_smoothing_factor": 0.3}), ("bert", "masked-lm", {}),
])  # fmt: skip
def test_a_compiled_loss_is_one_graph_with_the_plain_losses_gradients(name, task, changes, loss):
    def of(compiled):
        step = step_of(changed_model(name) if name in CHANGED_LOGITS else tiny_model(name), task,
                       loss if compiled else "plain", **changes)
        if compiled:
            whole = partial(torch.compile, backend="aot_eager", fullgraph=True)
            step.build.__dict__["loss"] = step.build.loss.compiled(whole)
        found = learned(step, task)
        evaluated = step.evaluate([global_batch_of(micro_batches(task, (2, 2, 2)))])
        return *found, evaluated.loss.mean, evaluated.correct

    (plain, expected, held_out, right), (made, mean, ours, correct) = of(False), of(True)
    assert worst(plain, made) <= LIMITS["fp32"]
    assert [mean, ours] == pytest.approx([expected, held_out], rel=1e-5)
    assert correct == right


def test_compiled_blocks_have_a_compiled_loss_which_keeps_no_fp32_logits():
    gpu = Device(kind="cuda", name="a GPU", memory_bytes=80 * 2**30, capability=(9, 0))

    def peak(**changes):
        recipe = Recipe.from_dict({
            "model": "gpt2", "model_overrides": {"n_layer": 1, "n_embd": 64, "n_head": 2}, "seq_len": 512,
            "micro_batch_size": 8, "batch_size": 8, "precision": "bf16", "optimizer": "adamw", "data": "dummy",
            **changes})
        return predict(resolve(recipe, gpu), gpu).peak()[1]

    logits = 8 * 512 * 50257
    for loss, bytes_each in (("plain", 7), ({"name": "chunked", "tokens": 4096}, 5)):
        assert peak(loss=loss, compile="off") - peak(loss=loss, compile="per-block") > bytes_each * logits


@pytest.mark.cold
@pytest.mark.parametrize("loss", ["plain", SMALL], ids=["plain", "chunked"])
def test_inductor_compiles_the_loss(loss):
    plain, expected = learned(step_of(tiny_model("gpt2"), "causal-lm", "plain"), "causal-lm")
    made, mean = learned(step_of(tiny_model("gpt2"), "causal-lm", loss, compile="per-block"), "causal-lm")
    assert worst(plain, made) <= LIMITS["fp32"]
    assert mean == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["plain", SMALL])
def test_smoothed_labels_are_those_of_transformers_trainer_and_evaluations_have_none(loss):
    model = tiny_model("gpt2")
    model.get_output_embeddings().weight.data *= 20  # sure of itself, so that smoothing tells
    step = step_of(model, "causal-lm", loss, label_smoothing_factor=0.3)
    batch = next(iter(tensor_global_batch(global_batch_of(micro_batches("causal-lm", (ROWS,)))).micro_batches))
    logits = step.build.logits(batch) if loss == "plain" else step.build.model(**batch.inputs).logits
    smoother = LabelSmoother(epsilon=0.3)
    found = step.build.loss_sum(batch)
    expected = smoother({"logits": logits}, batch.labels) * (batch.labels != IGNORE).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    step.build.model.eval()
    plain = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    assert step.build.loss_sum(batch).item() == pytest.approx(plain.item(), rel=1e-5)
    assert abs(found.item() - plain.item()) > 4.0


@pytest.mark.parametrize(("precision", "limit"), [("bf16", 0.02), ("fp16", 0.005), ("bf16-pure", 0.02)])
def test_half_precision_is_as_near_as_the_plain_loss(precision, limit):
    """Both against fp32; the loss itself in fp32, to its own rounding of the logits."""
    exact, expected = learned(step_of(tiny_model("llama"), "causal-lm", "plain"), "causal-lm")
    errors = []
    for loss in ("plain", SMALL):
        step = step_of(tiny_model("llama"), "causal-lm", loss, precision=precision, optimizer="adamw")
        scale = step.update.scale(torch.ones(())).item()
        found, mean = learned(step, "causal-lm")
        assert mean == pytest.approx(expected, rel=1e-3)
        errors.append(worst(exact, {name: g.float() / scale for name, g in found.items()}))
    assert max(errors) < limit
    assert errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("name", CHANGED_LOGITS)
def test_the_comparison_with_the_models_own_logits_allows_for_autocasts_rounding(name):
    (_, plain), (_, chunked) = [learned(step_of(changed_model(name), "causal-lm", loss, precision="bf16"), "causal-lm")
                                for loss in ("plain", SMALL)]
    assert chunked == pytest.approx(plain, rel=1e-2)


def test_many_chunks_in_bf16_lose_no_more_than_one():
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 32, dtype=torch.float64), torch.randn(64, 32, dtype=torch.float64) / 4
    labels = torch.randint(0, 64, (512,))

    def gradient(tokens: int, dtype: torch.dtype) -> torch.Tensor:
        rounded = weight.bfloat16().to(dtype).requires_grad_()
        chunked_cross_entropy(hidden.bfloat16().to(dtype), rounded, None, labels, tokens).backward()
        return rounded.grad.double()

    exact = gradient(512, torch.float64)
    errors = [(gradient(tokens, torch.bfloat16) - exact).norm() / exact.norm() for tokens in (512, 8)]
    assert errors[1] < 1.5 * errors[0] < 0.01  # sums in bf16 themselves would lose three times as much


def test_nothing_to_count_is_a_loss_of_nothing():
    weight = torch.randn(8, 4, requires_grad=True)
    labels = torch.full((5,), IGNORE)
    loss = chunked_cross_entropy(torch.randn(5, 4), weight, None, labels, 2)
    loss.backward()
    assert loss.item() == 0.0
    assert not weight.grad.any()


def test_an_automatic_chunk_is_a_power_of_two_within_its_bytes():
    sizes = {vocabulary: Chunked().chunk(vocabulary) for vocabulary in (96, 32_000, 50_257, 128_256, 262_144, 10**6)}
    assert sizes == {96: 4096, 32_000: 2048, 50_257: 1024, 128_256: 512, 262_144: 256, 10**6: 256}
    assert all(4 * v * n <= CHUNK_BYTES for v, n in sizes.items() if v < 10**6)
    assert Chunked(tokens=7).chunk(50_257) == 7


def test_evaluation_generation_and_what_is_saved_are_the_models_own(tmp_path):
    plain, chunked = (step_of(tiny_model("bart"), "seq2seq", loss) for loss in ("plain", SMALL))
    global_batch = tensor_global_batch(global_batch_of(micro_batches("seq2seq", (ROWS,))))
    one, other = chunked.evaluate([global_batch]), plain.evaluate([global_batch])
    assert one.loss.mean == pytest.approx(other.loss.mean, rel=1e-6)
    assert one.correct == other.correct > 0
    assert chunked.build.model.state_dict().keys() == plain.build.model.state_dict().keys()
    plain, chunked = (step_of(tiny_model("llama"), "causal-lm", loss, seq_len=16) for loss in ("plain", SMALL))
    assert chunked.generate([1, 2, 3], 5, 0.0, 0) == plain.generate([1, 2, 3], 5, 0.0, 0)
    chunked.export(tmp_path, None)
    stored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(stored.parameters(), plain.build.model.parameters(), strict=True))


def test_the_first_micro_batch_is_compared_with_the_models_own_logits():
    class Shifted(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            return dataclasses.replace(output, logits=output.logits * 1.1)

    class Capped(transformers.LlamaForCausalLM):
        """A softcap that leaves the logits of a new head nearly as they are."""

        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            return dataclasses.replace(output, logits=15 * torch.tanh(output.logits / 15))

    class Scaled(transformers.LlamaForCausalLM):
        """A factor that is trained, and is 1 before."""

        def __init__(self, config):
            super().__init__(config)
            self.log_scale = torch.nn.Parameter(torch.zeros(()))

        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            return dataclasses.replace(output, logits=output.logits * self.log_scale.exp())

    for kind in (Capped, Scaled):
        for precision in ("fp32", "bf16"):
            step = step_of(kind(tiny_config("llama")), "causal-lm", SMALL, precision=precision)
            with pytest.raises(ModelError, match=rf"loss: {kind.__name__} makes its logits otherwise"):
                learned(step, "causal-lm")
            assert torch.is_grad_enabled()
    torch.manual_seed(0)
    step = step_of(Shifted(tiny_config("llama")), "causal-lm", SMALL)
    with pytest.raises(ModelError, match=r"loss: Shifted makes its logits otherwise .* write loss=plain"):
        learned(step, "causal-lm")


class Reshaping(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Works on the logits as a whole."""

    def forward(self, input_ids, **kwargs):
        logits = super().forward(input_ids, **kwargs).logits
        return logits.reshape(*input_ids.shape, VOCAB)


CLOSED = {"checkpointing": "none", "compile": "off", "attention": "sdpa", "precision": "fp32", "optimizer": "adamw"}


class Twice(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Calls its head twice."""

    def forward(self, *args, **kwargs):
        super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


class Curved(Scores):
    """A head that is no linear layer."""

    def get_output_embeddings(self):
        return nn.Sequential(self.out)


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Scores(VOCAB), "loss: Scores names no output embedding .* write loss=plain"),
    (lambda: Curved(VOCAB), "loss: the head of Curved is a Sequential, and no linear layer of torch; write loss=plain"),
    (lambda: Reshaping(tiny_config("llama")), "loss: Reshaping works on its logits as a whole: .* write loss=plain"),
    (lambda: Twice(tiny_config("llama")), "loss: Twice calls its head 2 times in a forward pass; write loss=plain"),
], ids=["headless", "curved", "reshaping", "twice"])  # fmt: skip
def test_what_it_cannot_serve_is_refused_by_name_by_plans_too(make, said):
    recipe = Recipe.from_dict({"loss": "chunked", "seq_len": 16, "batch_size": 2, "micro_batch_size": 2,
                               "data": "dummy", "vocab_size": VOCAB, "device": "cpu"})
    device = PytorchBackend().device(recipe)
    with pytest.raises((Refused, ModelError), match=said):
        predict(resolve(recipe, device), device, make())


def test_a_plan_of_an_open_loss_takes_the_plain_one_where_a_head_cannot_have_another():
    pinned = {"data": "dummy", "seq_len": 16, "batch_size": 4, "micro_batch_size": 4, "vocab_size": VOCAB, **CLOSED}
    assert plan(Scores(VOCAB), pinned, gpu="rtx-4090").recipe.loss == Plain()


def test_a_plan_of_an_open_loss_takes_chunks_where_whole_logits_do_not_fit():
    pinned = {"seq_len": 1024, "batch_size": 32, "micro_batch_size": 32, **CLOSED, "precision": "bf16",
              "offload": "none", "model_overrides": {"attn_pdrop": 0, "n_layer": 2}}
    planned = plan("gpt2", pinned, gpu="rtx-4090")
    assert planned.recipe.loss == Chunked()
    assert any("loss=plain does not fit" in sentence for sentence in planned.answers.would_not_fit)


def test_a_task_of_classes_is_refused_before_a_model_is_built():
    recipe = Recipe(task="sequence-classification", loss="chunked")
    assert "write loss=plain" in recipe.refusals(Device(kind="cpu", name="CPU", memory_bytes=0))[0]


def test_a_loop_of_ones_own_is_told_of_the_loss():
    closed = {**CLOSED, "batch_size": 4, "micro_batch_size": 2, "seq_len": 40, "device": "cpu", "data": "dummy"}
    ids = torch.randint(0, VOCAB, (2, 12))
    losses = []
    for loss in ("plain", SMALL):
        applied = apply(tiny_model("llama"), {**closed, "loss": loss})
        losses.append(applied.loss_sum({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids))
        assert applied.model(input_ids=ids).logits.shape == (2, 12, VOCAB)
        assert any("applied.loss_sum" in sentence for sentence in applied.left_to_you) == (loss is SMALL)
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    losses[1].backward()


def test_a_plan_puts_its_work_in_the_head():
    recipe = Recipe.from_dict({
        "model": "gpt2", "model_overrides": {"n_layer": 2, "n_embd": 64, "n_head": 4}, "vocab_size": 512,
        "seq_len": 64, "batch_size": 4, "micro_batch_size": 4, "data": "dummy", "device": "cpu",
        "loss": {"name": "chunked", "tokens": 64},
    })
    device = PytorchBackend().device(recipe)
    trace = predict(resolve(recipe, device), device)
    work = [op for op in trace.ops if "log_softmax" in op.name or "nll_loss" in op.name]
    assert work
    assert {op.module for op in work} == {"lm_head"}
    assert {op.phase.value for op in work} == {"forward", "evaluation"}
    scaled = [op for op in trace.ops if op.phase.value == "backward" and op.module == "lm_head"]
    assert {"aten.mul_.Tensor"} <= {op.name for op in scaled}


@pytest.mark.usefixtures("few_objects")
def test_a_profile_puts_its_work_in_the_head():
    step = step_of(tiny_model("gpt2"), "causal-lm", SMALL)
    global_batch = tensor_global_batch(global_batch_of(micro_batches("causal-lm", (ROWS,))))
    trace = measure(PytorchBackend(), step, iter([global_batch] * 9)).trace
    work = [op for op in trace.ops if "log_softmax" in op.name or op.name == "aten.mul_.Tensor"]
    places = {(op.module, op.phase.value) for op in work}
    assert {("lm_head", "forward"), ("lm_head", "backward")} <= places
    assert all(module == "lm_head" for module, phase in places if phase == "forward")


def predicted_peak(gpu: Device, **changes: object) -> int:
    recipe = Recipe.from_dict({"model": "gpt2", "batch_size": 8, "micro_batch_size": 8, "seq_len": 1024,
                               "data": "dummy", "precision": "bf16-pure", **changes})
    gc.collect()
    return predict(resolve(recipe, gpu), gpu).peak()[1]


@pytest.mark.full_size
def test_gpt2_at_batch_8_takes_3_gib_less():
    gpu = Device(kind="cuda", name="a GPU", memory_bytes=80 * 2**30, capability=(9, 0))
    saved = predicted_peak(gpu, loss="plain") - predicted_peak(gpu, loss="chunked")
    assert saved > 3 * 2**30

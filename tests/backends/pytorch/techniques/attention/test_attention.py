"""Our attention functions give what transformers' own give, for every mask kind, and refuse what they cannot serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses import FakeTensorMode

from tests.architectures import CAUSAL, IMAGES, MASKED, SEQ2SEQ, tiny_model
from tests.backends.pytorch.techniques.attention.attention_cases import batch_of, built, make, real, reference, task_of
from tests.backends.pytorch.techniques.checkpointing.checkpointing_cases import Recorder
from tightfit.backends.pytorch.techniques.attention import apply as attention
from tightfit.backends.pytorch.techniques.attention import arguments as masking
from tightfit.backends.pytorch.techniques.attention import functions, kernels
from tightfit.backends.pytorch.techniques.attention.arguments import attention_style
from tightfit.backends.pytorch.techniques.attention.masks import dense_mask, document_mask, plain_mask
from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.recipe import Recipe
from tightfit.techniques.attention import Attention, Eager, Flex, Sdpa

NAMES = (*CAUSAL, *MASKED, *SEQ2SEQ, *IMAGES, "gemma3", "modernbert", "llama4", "biogpt", "t5gemma")
OWN = ("gpt_neo", "gptj", "falcon", "bloom", "deepseek_v32", "doge")


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "none") for name in NAMES), *((name, "padded") for name in NAMES if name not in IMAGES)]
)
def test_logits_are_those_of_transformers_own_attention(name: str, kind: str) -> None:
    task = task_of(name)
    batch = batch_of(kind, task)
    expected = real(reference(name, batch), batch, task)
    for technique in (Eager(), Sdpa()):
        with torch.no_grad():
            logits = built(make(name), technique, task).logits(batch)
        assert worst(real(logits, batch, task), expected) < 1e-10, technique


@pytest.mark.parametrize("technique", [Eager(), Sdpa()])
def test_a_classifier_that_takes_the_mean_over_real_tokens(technique: Attention) -> None:
    """Which reads the mask of padding outside of attention."""
    model = make("modernbert")
    model.config.classifier_pooling = "mean"
    classifier = transformers.ModernBertForSequenceClassification(model.config).double().eval()
    padded, whole = (batch_of(kind, "masked-lm") for kind in ("padded", "none"))
    with torch.no_grad():
        expected = classifier(**padded.inputs, attention_mask=padded.padding.long()).logits, classifier(
            **whole.inputs).logits
        build = built(classifier, technique, "sequence-classification")
        for batch, logits in zip((padded, whole), expected, strict=True):
            assert worst(build.logits(batch), logits) < 1e-10


def test_a_class_that_is_read_at_the_end_of_a_row_is_not_read_of_padding() -> None:
    model = transformers.XLNetForSequenceClassification(
        transformers.XLNetConfig(vocab_size=96, d_model=16, n_layer=1, n_head=2, d_inner=16)).eval()
    build = built(model, Sdpa(), "sequence-classification")
    assert build.logits(batch_of("none", "masked-lm")).shape == (2, 2)
    with pytest.raises(ModelError, match="end of a row, where shorter texts have padding; write micro_batch_size=1"):
        build.logits(batch_of("padded", "masked-lm"))


def test_the_models_attend_at_all() -> None:
    """Without this the test above could pass on models whose attention does nothing."""
    batch = batch_of("none", "causal-lm")
    changed = batch_of("none", "causal-lm")
    changed.inputs["input_ids"][:, 0] = 5
    assert worst(reference("llama", batch)[:, 8:], reference("llama", changed)[:, 8:]) > 1e-3


@pytest.mark.parametrize("name", OWN)
def test_models_with_attention_of_their_own_keep_it(name: str) -> None:
    assert attention_style(make(name)) == "own"
    for kind in ("none", "padded"):
        batch = batch_of(kind, "causal-lm")
        build = built(make(name), Sdpa())
        assert "computes attention itself" in build.notes[-1]
        with torch.no_grad():
            later = {**batch.inputs, "input_ids": batch.inputs["input_ids"].clone()}
            later["input_ids"][:, 12:] = 5
            assert worst(build.logits(batch)[:, :12], build.logits(replace(batch, inputs=later))[:, :12]) < 1e-10
            assert worst(real(build.logits(batch), batch, ""), real(reference(name, batch, "eager"), batch, "")) < 1e-10
    with pytest.raises(Refused, match="write attention=auto"):
        built(make(name), Sdpa(kernel="math"))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_scores_that_sdpa_cannot_serve_run_in_eager(name: str) -> None:
    batch = batch_of("none", "causal-lm")
    build = built(make(name), Sdpa())
    assert "need eager attention" in build.notes[-1]
    with torch.no_grad():
        # transformers' softmax is in fp32 here, whatever the model's format
        assert worst(build.logits(batch), reference(name, batch, "eager")) < 1e-5
    with pytest.raises(Refused, match="write attention=eager"):
        built(make(name), Sdpa(kernel="math"))


def test_sdpa_refuses_what_it_would_ignore() -> None:
    q = torch.randn(1, 2, 4, 8)
    for argument in ("softcap", "s_aux", "indices"):
        with pytest.raises(ModelError, match=argument):
            functions.sdpa_attention(nn.Module(), q, q, q, None, **{argument: 1.0})
    with pytest.raises(ModelError, match="indices"):
        functions.eager_attention(nn.Module(), q, q, q, None, indices=q)


def inputs(heads_for_keys: int = 2, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    sizes = (4, heads_for_keys, heads_for_keys)
    return tuple(torch.randn(2, heads, 24, 8, dtype=dtype, requires_grad=True) for heads in sizes)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_slices_dense_and_eager_agree_in_value_and_gradient(causal: bool, window: int | None) -> None:
    starts = batch_of("packed", "causal-lm").document_starts
    assert starts is not None
    mask = starts.view(1, 1, 1, -1)
    query, key, value = inputs()
    module = nn.Module()

    def dense() -> torch.Tensor:
        allowed = dense_mask(mask, query, causal, window)
        out = kernels.sdpa(query, key, value, allowed, False, 0.0, None)
        return out.transpose(1, 2)

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "slices": lambda: functions.sdpa_attention(
            module, query, key, value, mask, is_causal=causal, sliding_window=window)[0],
        "eager": lambda: functions.eager_attention(
            module, query, key, value, mask, is_causal=causal, sliding_window=window)[0],
        "dense": dense,
    }
    assert kernels.packed_way(query, value, mask, 0.0, None) == "slices"
    results = {}
    for name, way in ways.items():
        out = way()
        grads = torch.autograd.grad(out.pow(2).sum(), (query, key, value))
        results[name] = torch.cat([t.flatten() for t in (out, *grads)])
    assert worst(results["slices"], results["dense"]) < 1e-12
    assert worst(results["eager"], results["dense"]) < 1e-12


def test_a_document_a_row_needs_no_mask() -> None:
    query, key, value = inputs()
    starts = torch.tensor([0, 24, 48], dtype=torch.int32).view(1, 1, 1, -1)
    plain, _ = functions.sdpa_attention(nn.Module(), query, key, value, None, is_causal=True)
    packed, _ = functions.sdpa_attention(nn.Module(), query, key, value, starts, is_causal=True)
    assert torch.equal(plain, packed)
    assert plain.is_contiguous()
    assert plain.shape == (2, 24, 4, 8)


def test_position_bias_with_every_mask() -> None:
    query, key, value = inputs(4)
    bias = torch.randn(1, 4, 24, 24, dtype=torch.float64)
    packed = batch_of("packed", "causal-lm").document_starts
    padding = batch_of("padded", "causal-lm").padding
    assert packed is not None
    assert padding is not None
    for mask in (None, plain_mask(query.device), packed.view(1, 1, 1, -1), padding[:, None, None]):
        for causal in (True, False):
            out = [f(nn.Module(), query, key, value, mask, is_causal=causal, position_bias=bias)[0]
                   for f in (functions.eager_attention, functions.sdpa_attention)]
            real_rows = padding if mask is not None and mask.dtype == torch.bool else torch.ones_like(padding)
            assert worst(out[0][real_rows], out[1][real_rows]) < 1e-12


def test_the_document_mask_is_block_diagonal() -> None:
    starts = torch.tensor([0, 2, 3, 5, 6], dtype=torch.int32)
    ids = torch.tensor([[0, 0, 1], [2, 2, 3]])
    assert torch.equal(document_mask(starts, 2, 3)[:, 0], ids[:, :, None] == ids[:, None, :])


@pytest.mark.parametrize("kind", ["none", "padded"])
def test_a_loop_that_is_not_ours_gets_the_same_logits(kind: str) -> None:
    """transformers calls our mask function, on its own 2-D masks or none."""
    for name in ("llama", "mistral", "bert", "t5"):
        task = task_of(name)
        batch = batch_of(kind, task)
        model = built(make(name), Sdpa(), task).model
        arguments = {**batch.inputs}
        if batch.padding is not None:
            arguments["attention_mask"] = batch.padding.long()
        with torch.no_grad():
            logits = model(**arguments).logits
        assert worst(real(logits, batch, task), real(reference(name, batch), batch, task)) < 1e-10


def test_generation_with_a_cache_still_works() -> None:
    ids = batch_of("none", "causal-lm").inputs["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    ours = built(make("llama"), Sdpa()).model.generate(ids, attention_mask=mask, **options)  # type: ignore[operator]
    theirs = make("llama", "sdpa").generate(ids, attention_mask=mask, **options)  # type: ignore[operator]
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("technique", [Eager(), Sdpa()])
def test_recomputed_and_autocast_passes_agree(technique: Eager | Sdpa) -> None:
    model = make("llama").train()
    batch = batch_of("packed", "causal-lm")
    build = built(model, technique)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        build.logits(batch).pow(2).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = build.logits(batch)
    assert logits.isfinite().all()


def test_a_block_compiles_without_a_break() -> None:
    model = make("llama")
    build = built(model, Sdpa())
    batch = batch_of("none", "causal-lm")
    with torch.no_grad():
        expected = build.logits(batch)
        for layer in model.get_submodule("model.layers").children():
            layer.compile(backend="aot_eager", fullgraph=True)
        assert worst(build.logits(batch), expected) < 1e-12
        packed = batch_of("packed", "causal-lm")
        torch.compiler.reset()
        assert worst(build.logits(packed), built(make("llama"), Sdpa()).logits(packed)) < 1e-12


@pytest.mark.parametrize("kind", ["none", "padded", "packed"])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_fake_tensors_take_the_same_path(name: str, kind: str) -> None:
    build = built(make(name), Sdpa(), task_of(name))
    batch = batch_of(kind, task_of(name))
    with torch.no_grad():
        seen = _ops(lambda: build.logits(batch))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = batch.map(mode.from_tensor)
            pretended = _ops(lambda: build.logits(fake))
    attention = {op for op in seen if "scaled_dot_product" in op}
    assert attention
    assert {op for op in pretended if "scaled_dot_product" in op} == attention


def _ops(run: Callable[[], object]) -> set[str]:
    """Names of the ATen ops that a call dispatches."""
    with Recorder() as recorder:
        run()
    return set(recorder.ops)


@pytest.mark.parametrize("kind", ["none", "padded", "packed"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mistral", "gemma2"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_agrees_with_eager(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, which is slow and has the same block masks and score changes."""
    monkeypatch.setattr(functions, "_compiled", lambda function: function)
    task = task_of(name)
    batch = batch_of(kind, task)
    windowed = name in ("mistral", "gemma2") and kind == "packed"
    with torch.no_grad():
        expected = built(make(name), Eager(), task).logits(batch)
        build = built(make(name), Flex(), task)
        if windowed:
            with pytest.raises(ModelError, match="sliding window"):
                build.logits(batch)
            return
        assert worst(real(build.logits(batch), batch, task), real(expected, batch, task)) < 1e-10


@pytest.mark.parametrize("window", [None, 5])
def test_the_variable_length_kernel_is_called_as_this_torch_wants(window: int | None) -> None:
    starts = batch_of("packed", "causal-lm").document_starts
    with FakeTensorMode() as mode:
        query, key, value = (mode.from_tensor(t.detach().half()) for t in inputs())
        out = kernels.varlen(query, key, value, mode.from_tensor(starts), True, window, 0.0, None)
    assert out.shape == (2, 24, 4, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("heads_for_keys", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5])
def test_the_variable_length_kernel_agrees_with_slices(heads_for_keys: int, causal: bool, window: int | None) -> None:
    starts = batch_of("packed", "causal-lm").document_starts
    assert starts is not None
    mask = starts.view(1, 1, 1, -1)
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        tensors = [t.detach().to(device, dtype).requires_grad_() for t in inputs(heads_for_keys)]
        expected = "slices" if device == "cpu" else "varlen"
        assert kernels.packed_way(tensors[0], tensors[2], mask, 0.0, None) == expected
        q, k, v = tensors
        out, _ = functions.sdpa_attention(
            nn.Module(), q, k, v, mask.to(device), is_causal=causal, sliding_window=window)
        grads = torch.autograd.grad(out.pow(2).sum(), tensors)
        results.append([t.double().cpu() for t in (out, *grads)])
    for exact, half in zip(*results, strict=True):
        assert worst(exact, half) < 0.05 * exact.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "padded", "packed"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_kernels_agree_on_the_gpu(name: str, kind: str) -> None:
    task = task_of(name)
    batch = batch_of(kind, task)
    with torch.no_grad():
        expected = built(make(name), Eager(), task).logits(batch)
    build = built(make(name).to("cuda", torch.float32), Sdpa(), task)
    logits = build.logits(batch.to(torch.device("cuda")))
    logits.sum().backward()
    assert worst(real(logits.cpu().double(), batch, task), real(expected, batch, task)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "padded", "packed"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_flex_agrees_on_the_gpu(name: str, kind: str) -> None:
    task = task_of(name)
    batch = batch_of(kind, task)

    def logits(technique: Attention) -> torch.Tensor:
        model = tiny_model(name, num_attention_heads=2, **{} if name == "bert" else {"num_key_value_heads": 1})
        build = built(model.to("cuda").eval(), technique, task)
        found = build.logits(batch.to(torch.device("cuda")))
        found.sum().backward()
        return real(found.cpu().double(), batch, task)

    assert worst(logits(Flex()), logits(Eager())) < 1e-2


def test_kernel_names() -> None:
    model, batch = make("llama"), batch_of("none", "causal-lm")
    cases = {"sdpa flash (CPU)": Sdpa(), "sdpa math (unfused)": Sdpa(kernel="math"),
             "eager (matrix products and a softmax)": Eager()}
    for expected, technique in cases.items():
        build = built(model, technique)
        with build.process_settings(), torch.no_grad(), torch.profiler.profile(acc_events=True) as profile:
            build.logits(batch)
        assert functions.kernel_names(event.key for event in profile.key_averages()) == [expected]
    assert functions.kernel_names(["aten::_flash_attention_forward", "torch_attn::_varlen_attn"]) == [
        "variable-length flash"]


def test_a_dense_mask_of_packed_documents_is_named(monkeypatch) -> None:
    monkeypatch.setattr(functions, "packed_way", lambda *args: "dense")
    build = built(make("llama"), Sdpa())
    for kind, mask in (("packed", [functions.DENSE_MASK]), ("none", [])):
        with torch.no_grad(), torch.autograd.profiler.profile(use_kineto=False) as profile:
            build.logits(batch_of(kind, "causal-lm"))
        assert functions.kernel_names(event.key for event in profile.key_averages())[1:] == mask


@pytest.mark.parametrize(("values", "changes", "capability", "said"), [
    ({"precision": "bf16"}, {}, (9, 0), None),
    ({"precision": "fp32", "data": {"packing": False}}, {}, (9, 0), None),
    ({"precision": "fp32"}, {}, (9, 0), "precision=bf16"),
    ({"precision": "fp16"}, {}, (7, 5), "data.packing=false"),
    ({"precision": "bf16"}, {"attention_dropout": 0.1}, (9, 0), "model_overrides.attention_dropout=0"),
    ({"precision": "bf16", "attention": {"name": "sdpa", "kernel": "efficient"}}, {}, (9, 0), "attention.kernel=auto"),
], ids=str)
def test_a_dense_mask_is_noted_at_the_build(values, changes, capability, said) -> None:
    recipe = Recipe.from_dict({"attention": "sdpa", **values})
    gpu = Device(kind="cuda", name="a GPU", memory_bytes=1 << 34, capability=capability)
    build = built(make("llama"), Eager())
    build = replace(build, recipe=recipe, device=gpu, model=tiny_model("llama", **changes))
    notes = attention.sdpa(recipe.attention, build).notes
    assert (said is None and not notes) or said in notes[0]


def test_what_keeps_the_kernel_off_newer_gpus_is_not_advised_where_there_is_none() -> None:
    recipe = Recipe.from_dict({"attention": {"name": "sdpa", "kernel": "efficient"}, "precision": "fp32"})
    gpu = Device(kind="cuda", name="T4", memory_bytes=1 << 34, capability=(7, 5))
    model = tiny_model("llama", attention_dropout=0.1)
    (note,) = attention.sdpa(recipe.attention, replace(built(make("llama"), Eager()), recipe=recipe, device=gpu,
                                                       model=model)).notes
    assert note.endswith("the T4 has no variable-length kernel; write data.packing=false or attention=flex")
    assert note.count("write") == 1


def test_flex_names_the_dropout_that_it_cannot_serve_in_training() -> None:
    build = replace(built(make("llama"), Eager()), model=tiny_model("llama", attention_dropout=0.1))
    with pytest.raises(Refused, match=r"flex has no dropout; write model_overrides.attention_dropout=0"):
        attention.flex(Flex(), build)
    attention.flex(Flex(), replace(build, recipe=build.recipe.model_copy(update={"mode": "inference"})))


def test_a_block_mask_of_causality_is_made_once_a_length() -> None:
    arguments = masking.block_arguments(make("llama"), True)
    first, second = (arguments(batch_of("none", "causal-lm", seed)) for seed in range(2))
    assert first["attention_mask"] is second["attention_mask"]
    assert masking.block_arguments(make("mistral"), True)(batch_of("none", "causal-lm"))["attention_mask"].numel() == 0


def test_the_choice_is_not_saved_with_the_model(tmp_path) -> None:
    built(make("llama"), Sdpa()).model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert "tightfit" not in (tmp_path / "config.json").read_text()


def test_a_module_without_attention_functions_is_refused() -> None:
    class Plain(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    with pytest.raises(Refused, match="Plain"):
        built(Plain(), Eager())
    with pytest.raises(ModelError, match="attention_mask"):
        built(Plain(), Sdpa(), "masked-lm").mask_arguments(batch_of("padded", "masked-lm"))

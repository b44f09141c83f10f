"""Inference on fake tensors: held to what a real `generate` allocates, by the profiler's own events."""

from __future__ import annotations

import pytest
import torch
import transformers

from cpu_truth import inference_peaks
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.simulate.generating import with_next_token
from tightfit.backends.pytorch.simulate.inference import inference_build, predict_inference
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.recipe import Recipe
from tightfit.trace import Category, Phase

pytestmark = pytest.mark.usefixtures("few_objects")

HOST = torch.device("cpu")
CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 34, units=1)
A100 = Device(kind="cuda", name="A100", memory_bytes=80 << 30, capability=(8, 0), units=108)
VOCAB = 300
NO_END = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
LLAMA = {
    **NO_END, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
MODELS = {
    "gpt2": {"model": "gpt2", "model_overrides": {
        **NO_END, "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 256,
    }},
    "llama": {"model": "llama-3.1-8b", "model_overrides": LLAMA},
    "t5": {"model": "t5-small", "task": "seq2seq", "model_overrides": {
        "vocab_size": VOCAB, "eos_token_id": None, "num_layers": 2, "num_decoder_layers": 2, "d_model": 64, "d_kv": 16,
        "num_heads": 4, "d_ff": 128,
    }},
    "sliding window": {"model": "mistral-7b", "model_overrides": {**LLAMA, "sliding_window": 8}},
}  # fmt: skip


def recipe(name="gpt2", *, new_tokens=12, beams=1, precision="fp32", attention="sdpa", seq_len=40, **fields):
    return Recipe.from_dict({
        **MODELS.get(name, {}), "mode": "inference", "precision": precision, "attention": attention,
        "seq_len": seq_len, "batch_size": 3, "inference": {"new_tokens": new_tokens, "beams": beams}, **fields,
    })  # fmt: skip


def predicted_peaks(trace):
    peaks = {}
    for span in trace.spans:
        peaks[span.name] = max(peaks.get(span.name, 0), trace.peak(span.start, span.stop)[1])
    return peaks


def real_peaks(asked):
    """Of transformers' own `generate`, which knows nothing of tightfit."""
    build = inference_build(asked, CPU, HOST)
    ids = torch.randint(3, VOCAB, (asked.batch_size, asked.seq_len))

    def run():
        given = ids.clone()
        done = build.model.generate(
            given, max_new_tokens=asked.inference.new_tokens, num_beams=asked.inference.beams, do_sample=False,
        )
        assert done.shape[1] == asked.inference.new_tokens + (1 if asked.task == "seq2seq" else asked.seq_len)

    with build.process_settings():
        return inference_peaks(build.model, run, build.forward_context)


CASES = [
    ("gpt2", 4, "fp32", "sdpa"), ("llama", 1, "fp32", "eager"), ("t5", 1, "fp32", "sdpa"), ("t5", 3, "fp32", "eager"),
    ("sliding window", 1, "fp32", "sdpa"), ("gpt2", 1, "bf16", "sdpa"),
    ("llama", 3, {"name": "bf16", "full_eval": True}, "sdpa"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "beams", "precision", "attention"), CASES)
def test_peaks_are_those_of_a_real_generate(model, beams, precision, attention):
    asked = recipe(model, beams=beams, precision=precision, attention=attention)
    predicted, real = predicted_peaks(predict_inference(asked, CPU)), real_peaks(asked)
    assert predicted.keys() == real.keys() == {"prefill", "decode"}
    for name, peak in real.items():
        assert predicted[name] == pytest.approx(peak, rel=0.02), name  # beams' own numbers, in a tiny model


def test_two_decoding_passes_stand_for_all():
    """By how often each is counted, they do the work of all passes one by one: it grows evenly with the cache."""
    by_length = [work(predict_inference(recipe("gpt2", new_tokens=2, seq_len=length), CPU), "flops")
                 for length in range(40, 52)]
    trace = predict_inference(recipe("gpt2", new_tokens=13), CPU)
    assert [span.times for span in trace.spans] == [1, 6, 6]
    assert work(trace, "flops") == pytest.approx(sum(by_length), rel=1e-3)


def work(trace, figure):
    decoding = [span for span in trace.spans if span.name == "decode"]
    return sum(
        span.times * getattr(op, figure) for span in decoding for op in trace.ops if span.start <= op.tick < span.stop
    )


def test_the_cache_is_its_own_category_and_grows_with_prompt_tokens_and_beams():
    def held(**changes):
        asked = recipe("llama", **changes)
        trace = predict_inference(asked, CPU)
        last = trace.spans[-1]
        return trace.by_category(last.stop - 1)[Category.KV_CACHE]

    token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads for keys, size of a head, bytes
    assert held(new_tokens=12) == 3 * (40 + 11) * token
    assert held(new_tokens=1) == 3 * 40 * token
    assert held(new_tokens=12, seq_len=80) == 3 * (80 + 11) * token
    assert held(new_tokens=12, beams=4) == 4 * 3 * (40 + 11) * token
    assert held(new_tokens=12, precision="bf16-pure") == 3 * (40 + 11) * token / 2


def test_weights_take_the_bytes_of_their_format():
    def held(precision):
        asked = recipe("llama", precision=precision)
        trace = predict_inference(asked, A100)
        return trace.by_category(trace.spans[-1].stop - 1)

    full, mixed, half, fp16 = (held(p) for p in ("fp32", "bf16", "bf16-pure", {"name": "fp16", "full_eval": True}))
    model = inference_build(recipe("llama"), CPU, HOST).model
    buffers = sum(t.nbytes for t in model.buffers())  # the frequencies of rotary positions stay fp32
    weights = sum(p.numel() for p in model.parameters())
    multiplied = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert full[Category.WEIGHTS] == mixed[Category.WEIGHTS] == 4 * weights + buffers
    assert half[Category.WEIGHTS] == fp16[Category.WEIGHTS] == 2 * weights + buffers
    assert mixed[Category.TEMPORARY] - half[Category.TEMPORARY] == pytest.approx(2 * multiplied, rel=0.1)


def test_phases_modules_and_categories_are_named():
    trace = predict_inference(recipe("gpt2"), A100)
    assert {op.phase for op in trace.ops} <= {Phase.PREFILL, Phase.DECODE, Phase.SETUP}
    assert any(op.phase is Phase.DECODE and op.module == "transformer.h.1.attn.c_attn" for op in trace.ops)
    assert any(op.flops for op in trace.ops)
    tick, peak = trace.peak(trace.spans[0].start)
    held = trace.by_category(tick)
    assert sum(held.values()) == peak
    assert held[Category.ACTIVATIONS] > 0
    assert held[Category.GRADIENTS] == held[Category.OPTIMIZER] == 0


def test_experts_are_gathered_for_each_token_where_a_gpu_decodes():
    config = transformers.MixtralConfig(**{**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2})
    model = transformers.AutoModelForCausalLM.from_config(config)

    def grouped(device):
        trace = predict_inference(recipe("", precision="bf16-pure"), device, model)
        return {op.phase for op in trace.ops if "_grouped_mm" in op.name} - {Phase.SETUP}

    assert grouped(A100) == {Phase.PREFILL}
    assert grouped(CPU) == {Phase.PREFILL, Phase.DECODE}


def test_a_deep_model_larger_than_this_machine_is_predicted():
    trace = predict_inference(Recipe.from_dict({
        "model": "llama-3.1-8b", "model_overrides": {"num_hidden_layers": 100}, "mode": "inference",
        "precision": "bf16-pure", "attention": "sdpa", "batch_size": 1, "inference": 1, "seq_len": 64,
    }), A100)  # fmt: skip
    assert predicted_peaks(trace)["prefill"] > 2 * 22e9


def test_a_model_without_a_cache_computes_its_context_again():
    overrides = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "head_dim": 16, "vocab_size": VOCAB,
                 "num_outputs": VOCAB, "max_seq_len": 64}
    asked = recipe("", model="transformer-156m", model_overrides=overrides)
    trace = PytorchBackend().predict(asked, CPU)
    assert [span.times for span in trace.spans] == [1, 11]
    assert "keeps no cache" in " ".join(trace.notes)
    assert trace.by_category(trace.spans[-1].stop - 1)[Category.KV_CACHE] == 0
    build = inference_build(asked, CPU, HOST)

    def run():
        ids = torch.randint(VOCAB, (3, 40))
        for _ in range(3):
            ids = with_next_token(build, ids)
        assert ids.shape == (3, 43)

    for name, peak in inference_peaks(build.model, run).items():
        assert predicted_peaks(trace)[name] == pytest.approx(peak, rel=0.005), name
    with pytest.raises(Refused, match=r"inference\.beams: Transformer .*beams=1"):
        predict_inference(asked.override(inference={"beams": 2}), CPU)


def test_a_model_that_generates_nothing_makes_one_pass():
    overrides = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    asked = recipe("", model="bert-base", task="masked-lm", vocab_size=VOCAB, model_overrides=overrides, data="dummy")
    trace = predict_inference(asked, CPU)
    assert [span.name for span in trace.spans] == ["prefill"]
    assert "one forward pass" in " ".join(trace.notes)
    build = inference_build(asked, CPU, HOST)
    ids = torch.randint(VOCAB, (3, 40))
    real = inference_peaks(build.model, lambda: build.model(input_ids=ids, attention_mask=torch.ones(3, 40).bool()))
    assert predicted_peaks(trace)["prefill"] == pytest.approx(real["prefill"], rel=0.005)


@pytest.mark.parametrize(("changes", "words"), [
    ({"attention": "flash-attn"}, "attention=sdpa"),
    ({"compile": "per-block"}, "compile=off"),
    ({"seq_len": 250}, "250 tokens and 12 new ones are more than the model's 256 positions; write seq_len=244"),
    ({"precision": "auto"}, "still to be resolved"),
])
def test_what_cannot_be_planned_is_refused_with_what_to_write(changes, words):
    with pytest.raises(Refused, match=words):
        predict_inference(recipe(**changes), A100)


def test_what_only_training_reads_is_not_looked_at():
    plain = predict_inference(recipe(precision="bf16-pure"), A100)
    trained = predict_inference(
        recipe(precision="bf16-pure", optimizer="adafactor", checkpointing="every-block", micro_batch_size=1), A100
    )
    assert predicted_peaks(plain) == predicted_peaks(trained)


def test_a_model_of_the_callers_own_is_left_as_it_was():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, **{**NO_END, "n_positions": 64})
    model = transformers.AutoModelForCausalLM.from_config(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace = predict_inference(recipe(), CPU, model)
    assert predicted_peaks(trace).keys() == {"prefill", "decode"}
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())

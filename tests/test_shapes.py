"""Parameters and FLOPs from configurations, against the modules of PyTorch and the matrix products they really run."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.architectures import IMAGES, TASK_OF, VOCAB, tiny_config
from tightfit.backends.pytorch.transformer import Transformer
from tightfit.bundled import BUNDLED
from tightfit.errors import ModelError
from tightfit.models import TransformerConfig, read_config
from tightfit.recipe import Recipe
from tightfit.shapes import kv_cache_bytes, mfu, shape_of, training_flops
from tightfit.tasks import get_task

SCRIPTED = "ignore:.torch.jit.script:DeprecationWarning"
"""What importing transformers' DeBERTa gives."""

NUMBERS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 40, "pad_token_id": 0,
}
EXPERTS = {**NUMBERS, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
HEADS = {name: value for name, value in NUMBERS.items() if name != "num_key_value_heads"}
OPT = {**HEADS, "ffn_dim": 48, "word_embed_proj_dim": 16}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama, biases": ("LlamaConfig", "causal-lm", {
        **NUMBERS, "attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    "gpt2, n_inner": ("GPT2Config", "causal-lm", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 40,
                                                  "vocab_size": VOCAB, "n_positions": 40}),
    "gemma2": ("Gemma2Config", "causal-lm", {**NUMBERS, "head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", "causal-lm", {**NUMBERS, "head_dim": 16}),
    "phi, norms": ("PhiConfig", "causal-lm", {**HEADS, "qk_layernorm": True}),
    "phi3": ("Phi3Config", "causal-lm", NUMBERS),
    "gpt_neo": ("GPTNeoConfig", "causal-lm", {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 40,
        "attention_types": [[["global", "local"], 1]]}),
    "gptj": ("GPTJConfig", "causal-lm", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4,
                                         "vocab_size": VOCAB, "n_positions": 40}),
    "bloom": ("BloomConfig", "causal-lm", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}),
    "falcon": ("FalconConfig", "causal-lm", HEADS),
    "falcon, new": ("FalconConfig", "causal-lm", {
        **HEADS, "new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False}),
    "falcon, serial": ("FalconConfig", "causal-lm", {
        **HEADS, "parallel_attn": False, "multi_query": False, "bias": True, "ffn_hidden_size": 48}),
    "opt, projected": ("OPTConfig", "causal-lm", {**OPT, "do_layer_norm_before": False}),
    "opt, bare": ("OPTConfig", "causal-lm", {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    "stablelm": ("StableLmConfig", "causal-lm", {
        **NUMBERS, "use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": ("Starcoder2Config", "causal-lm", NUMBERS),
    "olmo": ("OlmoConfig", "causal-lm", NUMBERS),
    "olmo2": ("Olmo2Config", "causal-lm", NUMBERS),
    "smollm3": ("SmolLM3Config", "causal-lm", NUMBERS),
    "mixtral": ("MixtralConfig", "causal-lm", {**NUMBERS, "num_local_experts": 6}),
    "qwen2_moe": ("Qwen2MoeConfig", "causal-lm", {
        **EXPERTS, "num_hidden_layers": 4, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", "causal-lm", {**EXPERTS, "head_dim": 16, "mlp_only_layers": [0]}),
    "olmoe": ("OlmoeConfig", "causal-lm", {**NUMBERS, "num_experts": 6, "num_experts_per_tok": 2}),
    "deberta": ("DebertaConfig", "masked-lm", {**HEADS, **RELATIVE, "embedding_size": 16, "type_vocab_size": 0,
                                               "position_biased_input": False}),
    "deberta-v2": ("DebertaV2Config", "masked-lm", {**HEADS, **RELATIVE}),
    "deberta-v3": ("DebertaV2Config", "masked-lm", {
        **HEADS, **RELATIVE, "share_att_key": True, "position_buckets": 8, "conv_kernel_size": 3,
        "norm_rel_ebd": "layer_norm"}),
    "electra, projected": ("ElectraConfig", "masked-lm", {**HEADS, "embedding_size": 16}),
    "albert, groups": ("AlbertConfig", "masked-lm", {**HEADS, "embedding_size": 16, "num_hidden_groups": 2,
                                                    "inner_group_num": 3}),
    "bert, causal": ("BertConfig", "causal-lm", {**HEADS, "is_decoder": True}),
    "t5, gated": ("T5Config", "seq2seq", {
        "d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "vocab_size": VOCAB}),
    "bart, uneven": ("BartConfig", "seq2seq", {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 48,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": VOCAB, "pad_token_id": 0,
        "max_position_embeddings": 40}),
    "whisper": ("WhisperConfig", "seq2seq", {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 40, "decoder_ffn_dim": 48,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": VOCAB, "max_source_positions": 12,
        "max_target_positions": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "vit, no bias": ("ViTConfig", "image-classification", {
        **HEADS, "image_size": 16, "patch_size": 8, "qkv_bias": False, "num_labels": 5}),
}
CASES = {
    **{name: (tiny_config(name), TASK_OF[name]) for name in TASK_OF},
    **{name: (getattr(transformers, kind)(**numbers), task) for name, (kind, task, numbers) in CONFIGS.items()},
}
CLASSIFIERS = {name: (config, "sequence-classification") for name, (config, task) in CASES.items()
               if task in ("causal-lm", "masked-lm") and name != "olmoe"}


def build(config: Any, task: str) -> nn.Module:
    auto = "AutoModelForSpeechSeq2Seq" if config.model_type == "whisper" else get_task(task).auto_class
    model: nn.Module = getattr(transformers, auto).from_config(config)
    return model


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("config", "task"), [
    *(pytest.param(*case, id=name) for name, case in CASES.items()),
    *(pytest.param(*case, id=f"{name}: classes") for name, case in CLASSIFIERS.items()),
    *(pytest.param(CASES[name][0], "sequence-classification", id=f"{name}: classes") for name in ("t5", "bart")),
])
@pytest.mark.filterwarnings(SCRIPTED)
def test_parameters_are_the_modules(config: Any, task: str):
    with torch.device("meta"):
        model = build(config, task)
    shape = shape_of(config, task)
    assert shape.parameters == parameters(model)
    assert shape.notes == ()


@pytest.mark.parametrize("name", [name for name in BUNDLED if name != "transformer-156m"])
def test_bundled_shapes_are_the_modules(name: str):
    task = BUNDLED[name].task
    config = read_config(Recipe(model=name, task=task))
    with torch.device("meta"):
        model = build(config, task)
    assert shape_of(config, task).parameters == parameters(model)


def test_published_sizes():
    """GPT-2 of 124M (OpenAI), Llama 3.1 of 8.03B (Meta), the bundled transformer of 155,877,376."""
    sizes = {name: shape_of(read_config(Recipe(model=name)), "causal-lm").parameters
             for name in ("gpt2", "llama-3.1-8b", "transformer-156m")}
    assert sizes == {"gpt2": 124_439_808, "llama-3.1-8b": 8_030_261_248, "transformer-156m": 155_877_376}
    mixtral = shape_of(transformers.MixtralConfig(), "causal-lm")  # 8x7B: 46.7B, of which a token uses 12.9B (Mistral)
    assert round(mixtral.parameters / 1e9, 1) == 46.7
    assert round(mixtral.active_parameters / 1e9, 1) == 12.9


def inputs(config: Any, task: str, samples: int, length: int, target: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (samples, length))
    if task == "image-classification":
        return {"pixel_values": torch.randn(samples, 3, config.image_size, config.image_size)}
    decoder = {"decoder_input_ids": ids[:, :target]} if task == "seq2seq" else {}
    if config.model_type == "whisper":
        return {"input_features": torch.randn(samples, config.num_mel_bins, 2 * config.max_source_positions), **decoder}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **decoder}


def counted(model: nn.Module, arguments: dict[str, torch.Tensor]) -> int:
    """FLOPs of every matrix product in one forward and backward pass, but for the angles of rotary positions."""
    with FlopCounterMode(display=False) as counter:
        model(**arguments).logits.sum().backward()
    angles = sum(sum(ops.values()) for module, ops in counter.get_flop_counts().items()
                 if module.endswith("rotary_emb"))
    return counter.get_total_flops() - angles


@pytest.mark.parametrize(("config", "task"), [
    *(pytest.param(*case, id=name) for name, case in CASES.items()),
    *(pytest.param(*CLASSIFIERS[name], id=f"{name}: classes") for name in ("llama", "opt, projected", "bert")),
])
@pytest.mark.filterwarnings(SCRIPTED)
def test_training_flops_are_the_products_that_run(config: Any, task: str):
    config = type(config)(**config.to_dict())
    config._attn_implementation = "eager"  # plain products, every pair of positions
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = build(config, task).eval()
    samples, length, target = 2, 16, 10
    expected = counted(model, inputs(config, task, samples, length, target))
    assert training_flops(shape_of(config, task), samples, length, target if task == "seq2seq" else None) == expected


@pytest.mark.parametrize("causal", [True, False])
def test_the_bundled_transformer(causal: bool):
    config = TransformerConfig(hidden_size=32, num_layers=2, head_dim=16, num_heads=3, vocab_size=VOCAB,
                               num_outputs=VOCAB + 4, max_seq_len=20, mlp_expansion=3, causal_mask=causal)
    model = Transformer(config).eval()
    shape = shape_of(config, "causal-lm")
    assert shape.parameters == parameters(model)
    with sdpa_kernel(SDPBackend.MATH):
        assert training_flops(shape, 2, 16) == counted(model, {"input_ids": torch.randint(0, VOCAB, (2, 16))})
    assert (training_flops(shape, 2, 16, skip_masked=True) < training_flops(shape, 2, 16)) == causal


@pytest.mark.parametrize(("name", "window"), [("llama", None), ("mistral", 8), ("bert", None), ("t5", None)])
def test_masked_pairs_are_skipped_where_asked(name: str, window: int | None):
    config, task = CASES[name]
    length = 20
    allowed = sum(1 for query in range(length) for key in range(query + 1) if window is None or query - key < window)
    shape = shape_of(config, task)
    saved = training_flops(shape, 3, length) - training_flops(shape, 3, length, skip_masked=True)
    causal = sum(stack.layers for stack in shape.stacks if stack.causal)
    assert saved == 3 * 12 * shape.stacks[-1].width * causal * (length**2 - allowed)
    assert (saved == 0) == (name == "bert")


def test_flops_follow_six_n_d():
    """PaLM's rule, for GPT-2: 6 times the weights that are multiplied, and 12 for layer, width and position."""
    shape = shape_of(read_config(Recipe(model="gpt2")), "causal-lm")
    weights = 12 * 12 * 768**2 + 50257 * 768
    assert training_flops(shape, 1, 1024) == 1024 * (6 * weights + 12 * 12 * 768 * 1024)


def test_active_parameters_leave_out_unused_experts():
    for name, count, used in (("mixtral", 6, 2), ("qwen2_moe", 6, 2), ("qwen3_moe", 6, 2), ("olmoe", 6, 2)):
        config, task = CASES[name]
        with torch.device("meta"):
            model = build(config, task)
        experts = sum(p.numel() for path, p in model.named_parameters() if ".experts." in path)
        shape = shape_of(config, task)
        assert shape.parameters - shape.active_parameters == experts * (count - used) // count > 0
    assert shape_of(*CASES["llama"]).active_parameters == shape_of(*CASES["llama"]).parameters


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "t5"])
def test_kv_cache_is_what_generation_keeps(name: str):
    config, task = CASES[name]
    model = build(config, task).eval()
    ids = torch.randint(3, VOCAB, (2, 6))
    arguments = {"input_ids": ids, "decoder_input_ids": ids[:, :4]} if task == "seq2seq" else {"input_ids": ids}
    with torch.no_grad():
        cache = model(**arguments, use_cache=True).past_key_values
    parts = (cache.self_attention_cache, cache.cross_attention_cache) if task == "seq2seq" else (cache,)
    held = sum(tensor.nbytes for part in parts for layer in part.layers for tensor in (layer.keys, layer.values))
    length, source = (4, 6) if task == "seq2seq" else (6, 0)
    assert kv_cache_bytes(shape_of(config, task), 2, length, source, bytes_each=4) == held


def test_a_sliding_window_bounds_the_cache():
    shape = shape_of(*CASES["mistral"])
    assert kv_cache_bytes(shape, 1, 100) == kv_cache_bytes(shape, 1, 8) > kv_cache_bytes(shape, 1, 7)


def test_mfu():
    assert mfu(989.4e12, 2.0, 989.4e12) == 0.5
    assert mfu(1e12, 1.0, 0.0) == 0.0


@pytest.mark.parametrize("kind", ["CohereConfig", "Qwen2Config"])
def test_an_unknown_family_is_estimated_and_says_so(kind: str):
    config = getattr(transformers, kind)(**NUMBERS)
    with torch.device("meta"):
        real = parameters(build(config, "causal-lm"))
    config.model_type = "someone's own"
    shape = shape_of(config, "causal-lm")
    assert shape.parameters == pytest.approx(real, rel=0.01)
    assert "someone's own is not a family" in shape.notes[0]
    assert shape_of(config, "causal-lm", parameters=real).parameters == real


def test_a_model_without_sizes_needs_its_parameters():
    config = SimpleNamespace(width=32)
    with pytest.raises(ModelError, match=r"hidden_size.*give the number of its parameters"):
        shape_of(config, "causal-lm")
    shape = shape_of(config, "causal-lm", parameters=1000)
    assert (shape.parameters, training_flops(shape, 2, 10)) == (1000, 6 * 1000 * 20)
    assert shape.notes


def test_the_text_part_of_a_larger_model_says_so():
    config = transformers.Gemma3Config(text_config={**NUMBERS, "head_dim": 16})
    assert shape_of(config, "causal-lm").notes == ("only the text part of gemma3 is counted",)


def test_images_fix_their_own_length():
    shape = shape_of(*CASES[IMAGES[0]])
    assert training_flops(shape, 2, 1) == training_flops(shape, 2, 1000)


def test_shapes_need_no_framework():
    code = "import sys, tightfit.shapes; print(*sorted({'torch', 'transformers', 'jax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == ""

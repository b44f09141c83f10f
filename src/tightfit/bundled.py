"""The bundled models, shapes as plain numbers which need no file and no network, and the bundled recipes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

NORM_EPS = 1e-6
"""Of our own transformer's normalization."""
TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a unit normal cut off at two standard deviations, of which its weights are drawn."""


class Bundled(NamedTuple):
    """A shape that needs no file: a configuration class (or `transformer`), the task it is made for, its numbers."""

    config_class: str
    task: str
    numbers: Mapping[str, Any]


def _gpt2(layers: int, heads: int, width: int) -> Bundled:
    return Bundled("GPT2Config", "causal-lm", {"n_layer": layers, "n_head": heads, "n_embd": width})


def _t5(layers: int, heads: int, width: int, mlp: int) -> Bundled:
    return Bundled("T5Config", "seq2seq", {
        "num_layers": layers, "num_decoder_layers": layers, "num_heads": heads, "d_model": width, "d_ff": mlp,
        "d_kv": 64, "decoder_start_token_id": 0,
    })


def _sizes(layers: int, heads: int, width: int, mlp: int, **more: Any) -> dict[str, Any]:
    """The numbers by the names that most configurations have for them."""
    return {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width, "intermediate_size": mlp,
            **more}


def _vit(layers: int, heads: int, width: int, mlp: int, patch: int) -> Bundled:
    return Bundled("ViTConfig", "image-classification", _sizes(
        layers, heads, width, mlp, patch_size=patch, num_labels=1000))


def _rope(theta: float, kind: str = "default", **more: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


def _decoder(
    config_class: str, layers: int, heads: int, kv_heads: int, width: int, mlp: int, vocab: int | None = None,
    positions: int | None = None, *, rope: Mapping[str, Any] | None = None, **more: Any,
) -> Bundled:  # fmt: skip
    """Llama's shape and its descendants'. What is None is the configuration class's default."""
    optional = {"vocab_size": vocab, "max_position_embeddings": positions, "rope_parameters": rope}
    given = {name: value for name, value in optional.items() if value is not None}
    return Bundled(config_class, "causal-lm", _sizes(
        layers, heads, width, mlp, num_key_value_heads=kv_heads, **given, **more))


def _llama3(layers: int, width: int, mlp: int, rope_factor: float, tied: bool, heads: int = 32) -> Bundled:
    rope = _rope(500000.0, "llama3", factor=rope_factor, low_freq_factor=1.0, high_freq_factor=4.0,
                 original_max_position_embeddings=8192)
    return _decoder("LlamaConfig", layers, heads, 8, width, mlp, 128256, 131072, rope=rope, rms_norm_eps=1e-5,
                    bos_token_id=128000, eos_token_id=128001, tie_word_embeddings=tied)


def _qwen2(
    layers: int, heads: int, kv_heads: int, width: int, mlp: int, vocab: int, positions: int | None = None, **more: Any
) -> Bundled:
    return _decoder("Qwen2Config", layers, heads, kv_heads, width, mlp, vocab, positions, rope=_rope(1000000.0),
                    bos_token_id=151643, eos_token_id=151643, max_window_layers=layers, **more)


def _qwen3(layers: int, heads: int, width: int, mlp: int, tied: bool) -> Bundled:
    return _decoder("Qwen3Config", layers, heads, 8, width, mlp, 151936, 40960, rope=_rope(1000000.0), head_dim=128,
                    bos_token_id=151643, eos_token_id=151645, max_window_layers=layers, tie_word_embeddings=tied)


def _gemma3(
    layers: int, heads: int, kv_heads: int, width: int, mlp: int, vocab: int = 262208, positions: int = 131072, *,
    head_dim: int = 256, window: int = 1024, scalar: int = 256,
) -> Bundled:  # fmt: skip
    """The text decoder: above 1B the published model has a tower for images beside it. scalar: attention's scores are
    divided by its root."""
    full = _rope(1000000.0, "linear", factor=8.0) if positions > 32768 else _rope(1000000.0)
    return _decoder("Gemma3TextConfig", layers, heads, kv_heads, width, mlp, vocab, positions, head_dim=head_dim,
                    sliding_window=window, query_pre_attn_scalar=scalar,
                    rope={"full_attention": full, "sliding_attention": _rope(10000.0)})


BUNDLED: dict[str, Bundled] = {
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
    "bert-base": Bundled("BertConfig", "masked-lm", _sizes(12, 12, 768, 3072)),
    "bert-large": Bundled("BertConfig", "masked-lm", _sizes(24, 16, 1024, 4096)),
    "distilbert-base": Bundled("DistilBertConfig", "masked-lm", {
        "n_layers": 6, "n_heads": 12, "dim": 768, "hidden_dim": 3072,
    }),
    "roberta-base": Bundled("RobertaConfig", "masked-lm", {
        "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
    }),
    "t5-small": _t5(6, 8, 512, 2048),
    "t5-base": _t5(12, 12, 768, 3072),
    "t5-large": _t5(24, 16, 1024, 4096),
    "modernbert-base": Bundled("ModernBertConfig", "masked-lm", _sizes(22, 12, 768, 1152)),
    "modernbert-large": Bundled("ModernBertConfig", "masked-lm", _sizes(28, 16, 1024, 2624)),
    "llama-2-7b": _decoder("LlamaConfig", 32, 32, 32, 4096, 11008, 32000, 4096, rms_norm_eps=1e-5),
    "llama-3.1-8b": _llama3(32, 4096, 14336, rope_factor=8.0, tied=False),
    "llama-3.1-70b": _llama3(80, 8192, 28672, rope_factor=8.0, tied=False, heads=64),
    "llama-3.2-1b": _llama3(16, 2048, 8192, rope_factor=32.0, tied=True),
    "llama-3.2-3b": _llama3(28, 3072, 8192, rope_factor=32.0, tied=True, heads=24),
    "qwen2.5-0.5b": _qwen2(24, 14, 2, 896, 4864, 151936, tie_word_embeddings=True),
    "qwen2.5-1.5b": _qwen2(28, 12, 2, 1536, 8960, 151936, 131072, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen2(28, 28, 4, 3584, 18944, 152064, 131072),
    "qwen2.5-14b": _qwen2(48, 40, 8, 5120, 13824, 152064, 131072),
    "qwen2.5-32b": _qwen2(64, 40, 8, 5120, 27648, 152064, 131072),
    "qwen3-0.6b": _qwen3(28, 16, 1024, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 16, 2048, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 32, 2560, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 32, 4096, 12288, tied=False),
    "qwen3-14b": _qwen3(40, 40, 5120, 17408, tied=False),
    "qwen3-32b": _qwen3(64, 64, 5120, 25600, tied=False),
    "mistral-7b-v0.1": _decoder("MistralConfig", 32, 32, 8, 4096, 14336, 32000, 32768, rope=_rope(10000.0),
                                rms_norm_eps=1e-5, sliding_window=4096),
    "mistral-7b": _decoder("MistralConfig", 32, 32, 8, 4096, 14336, 32768, 32768, rope=_rope(1000000.0),
                           rms_norm_eps=1e-5, sliding_window=None),  # version 0.3: no sliding window
    "opt-125m": Bundled("OPTConfig", "causal-lm", {
        "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768, "ffn_dim": 3072,
    }),
    "pythia-160m": Bundled("GPTNeoXConfig", "causal-lm", _sizes(
        12, 12, 768, 3072, vocab_size=50304, bos_token_id=0, eos_token_id=0,
    )),
    "gemma-2b": _decoder("GemmaConfig", 18, 8, 1, 2048, 16384, head_dim=256),
    "gemma-3-1b": _gemma3(26, 4, 1, 1152, 6912, 262144, 32768, window=512),
    "gemma-3-4b": _gemma3(34, 8, 4, 2560, 10240),
    "gemma-3-12b": _gemma3(48, 16, 8, 3840, 15360),
    "gemma-3-27b": _gemma3(62, 32, 16, 5376, 21504, head_dim=128, scalar=168),
    "smollm3-3b": _decoder("SmolLM3Config", 36, 16, 4, 2048, 11008, 128256, 65536, rope=_rope(5000000.0),
                           tie_word_embeddings=True),
    "phi-4": _decoder("Phi3Config", 40, 40, 10, 5120, 17920, 100352, 16384, rms_norm_eps=1e-5,
                      rope=_rope(250000.0, partial_rotary_factor=1.0), original_max_position_embeddings=16384,
                      bos_token_id=100257, eos_token_id=100265, pad_token_id=100349, resid_pdrop=0.0, embd_pdrop=0.0),
    "phi-2": Bundled("PhiConfig", "causal-lm", _sizes(
        32, 32, 2560, 10240, resid_pdrop=0.1, bos_token_id=50256, eos_token_id=50256,
        rope_parameters=_rope(10000.0, partial_rotary_factor=0.4),
    )),
    "olmoe-1b-7b": _decoder("OlmoeConfig", 16, 16, 16, 2048, 1024, 50304, 4096, num_experts=64, num_experts_per_tok=8,
                            pad_token_id=1, eos_token_id=50279, router_aux_loss_coef=0.01),
    "gpt-oss-20b": _decoder("GptOssConfig", 24, 64, 8, 2880, 2880, 201088, 131072, head_dim=64, sliding_window=128,
                            num_local_experts=32, num_experts_per_tok=4, pad_token_id=199999, eos_token_id=200002,
                            router_aux_loss_coef=0.9),
    "qwen3-30b-a3b": _decoder("Qwen3MoeConfig", 48, 32, 4, 2048, 6144, 151936, 40960, rope=_rope(1000000.0),
                              norm_topk_prob=True, head_dim=128, num_experts=128, num_experts_per_tok=8,
                              moe_intermediate_size=768, decoder_sparse_step=1, bos_token_id=151643,
                              eos_token_id=151645),
    "moe-tiny": _decoder("Qwen3MoeConfig", 4, 4, 2, 128, 512, 2048, 1024, norm_topk_prob=True, head_dim=32,
                         num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, bos_token_id=0,
                         eos_token_id=0, router_aux_loss_coef=0.01,
                         decoder_sparse_step=2),  # every other feed-forward block is one of experts
    "vit-base": _vit(12, 12, 768, 3072, patch=16),
    "vit-large": _vit(24, 16, 1024, 4096, patch=16),
    "vit-huge": _vit(32, 16, 1280, 5120, patch=14),
    "transformer-156m": Bundled("transformer", "causal-lm", {}),
}
"""Bundled shapes by name. What a shape does not state is the configuration class's default."""

HUB_NAMES = frozenset({
    "albert-base-v2", "bert-base-cased", "bert-base-multilingual-cased", "bert-base-uncased", "bert-large-cased",
    "bert-large-uncased", "distilbert-base-cased", "distilbert-base-uncased", "distilgpt2", "distilroberta-base",
    "openai-gpt", "roberta-large", "t5-11b", "t5-3b", "xlm-roberta-base", "xlm-roberta-large",
    "xlnet-base-cased", "xlnet-large-cased",
})
"""Hugging Face ids without an owner: the hub's oldest models. Any other bare name is taken for a misspelling."""

REFUSED = {"whisper": "reads sound, and no task here does"}
"""Families that people ask for and that nothing here can train, by `model_type`, with the reason."""
SIZE = re.compile(r"-(\d+(\.\d+)?[bm]|tiny|mini|small|medium|base|large|huge|xl)(?=-|$)")


def refusal_of(name: str) -> str:
    """The reason why the model of that name or `model_type` can never be trained here; empty for any other."""
    last = name.lower().rpartition("/")[2]
    return next((reason for family, reason in REFUSED.items() if re.match(rf"{family}\b", last)), "")


def bundled_shape(name: str) -> str | None:
    """The bundled shape that a Hugging Face id has, whatever was trained into it: `meta-llama/Llama-3.2-3B-Instruct`
    is a `llama-3.2-3b`; None where none is."""
    last = _last(name)
    known = max((known for known in BUNDLED if f"{last}-".startswith(f"{known}-")), key=len, default=None)
    return None if known is None or (not SIZE.search(known) and SIZE.search(last[len(known):])) else known


def bundled_family(name: str) -> list[str]:
    """The bundled shapes whose names differ from a Hugging Face id's in the size alone, the smallest first."""
    return [known for known in BUNDLED if SIZE.split(known)[0] == SIZE.split(_last(name))[0]]


def bundled_recipes() -> dict[str, Any]:
    """The bundled recipes' files by name, sorted."""
    files = (resources.files("tightfit") / "recipes").iterdir()
    return {Path(file.name).stem: file for file in sorted(files, key=lambda f: f.name) if file.name.endswith(".yaml")}


def _last(name: str) -> str:
    return name.lower().rpartition("/")[2].removeprefix("meta-")

"""Families of decoders: one stack of causal layers, told apart by a few properties.

Counts are those of the classes in transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tightfit.shapes.parts import Body, Stack, Weights, attention, feed_forward, first, linear, plain


@dataclass(frozen=True)
class Decoder:
    """What tells one family of decoders from another. A bias is there or not, or as the named attribute says."""

    gated: bool = True
    norms: int = 2
    norm_size: int = 1  # in hidden sizes: 1 scales, 2 also shifts
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    query_norm: str = ""  # over each `head`, or over the `whole` projection
    learned_positions: bool = False
    embedding_norm: bool = False
    head: str = "lm"


LLAMA = Decoder(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
PLAIN = Decoder(gated=False, norm_size=2, qkv_bias=True, out_bias=True, mlp_bias=True)
DECODERS = {
    "llama": LLAMA, "smollm3": LLAMA, "granite": LLAMA, "mistral": Decoder(), "mixtral": Decoder(), "phi3": Decoder(),
    "qwen2": Decoder(qkv_bias=True), "qwen2_moe": Decoder(qkv_bias="qkv_bias"),
    "qwen3": Decoder(qkv_bias="attention_bias", out_bias="attention_bias", query_norm="head"),
    "qwen3_moe": Decoder(qkv_bias="attention_bias", out_bias="attention_bias", query_norm="head"),
    "olmo": Decoder(norms=0, norm_size=0, qkv_bias="attention_bias", out_bias="attention_bias"),
    "olmo2": Decoder(qkv_bias="attention_bias", out_bias="attention_bias", query_norm="whole"),
    "olmoe": Decoder(qkv_bias="attention_bias", out_bias="attention_bias", query_norm="whole"),
    "gemma": Decoder(qkv_bias="attention_bias", out_bias="attention_bias"),
    "gemma2": Decoder(norms=4, qkv_bias="attention_bias", out_bias="attention_bias"),
    "gemma3_text": Decoder(norms=4, qkv_bias="attention_bias", out_bias="attention_bias", query_norm="head"),
    "stablelm": Decoder(norm_size=2, qkv_bias="use_qkv_bias"),
    "starcoder2": Decoder(gated=False, norm_size=2, qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    "gpt2": Decoder(gated=False, norm_size=2, qkv_bias=True, out_bias=True, mlp_bias=True, learned_positions=True),
    "gpt_neo": Decoder(gated=False, norm_size=2, out_bias=True, mlp_bias=True, learned_positions=True),
    "gptj": Decoder(gated=False, norms=1, norm_size=2, mlp_bias=True, head="lm-bias"),
    "gpt_neox": Decoder(gated=False, norm_size=2, qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias=True),
    "phi": Decoder(gated=False, norms=1, norm_size=2, qkv_bias=True, out_bias=True, mlp_bias=True, head="lm-bias"),
    "bloom": Decoder(gated=False, norm_size=2, qkv_bias=True, out_bias=True, mlp_bias=True, embedding_norm=True),
    "falcon": Decoder(gated=False, norm_size=2, qkv_bias="bias", out_bias="bias", mlp_bias="bias"),
    "opt": Decoder(gated=False, norm_size=2, qkv_bias="enable_bias", out_bias="enable_bias", mlp_bias="enable_bias"),
}


def decoder(config: Any, family: Decoder) -> Body:
    """A stack of causal layers behind an embedding of words."""

    def has(bias: bool | str) -> bool:
        return bool(getattr(config, bias, False)) if isinstance(bias, str) else bias

    width, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    kv_heads = first(config, "num_key_value_heads", default=heads)
    head = first(config, "head_dim", default=width // heads)
    norms, embedding = family.norms, width
    if config.model_type == "falcon":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
        both = first(config, "num_ln_in_parallel_attn", default=2 if config.new_decoder_architecture else 1) == 2
        norms = 2 if both or not config.parallel_attn else 1
    if config.model_type == "stablelm" and config.use_parallel_residual:
        norms = 1
    norm = plain(family.norm_size * width)
    weights = plain(config.vocab_size * width) + norm * (family.norm_size > 0)
    lead = Weights()
    if config.model_type == "opt":
        embedding = config.word_embed_proj_dim
        norm = norm * config.layer_norm_elementwise_affine
        last = config.do_layer_norm_before and not getattr(config, "_remove_final_layer_norm", False)
        lead = linear(embedding, width) * (2 if embedding != width else 0)
        weights = plain(config.vocab_size * embedding + (config.max_position_embeddings + 2) * width) + norm * last
    if family.learned_positions:
        weights += plain(config.max_position_embeddings * width)
    if family.embedding_norm:
        weights += norm
    layer = attention(width, heads, kv_heads, head, has(family.qkv_bias), has(family.out_bias)) + norm * norms
    if family.query_norm == "head":
        layer += plain(2 * head)
    elif family.query_norm == "whole":
        layer += plain((heads + kv_heads) * head)
    if getattr(config, "qk_layernorm", False):  # Phi: one norm for all heads; StableLM: one for each, without shift
        layer += plain(4 * head if config.model_type == "phi" else (heads + kv_heads) * head)
    inner = first(config, "ffn_hidden_size", "ffn_dim", "intermediate_size", "n_inner", default=4 * width)
    dense = feed_forward(width, inner, family.gated, has(family.mlp_bias))
    sparse = _sparse_layers(config)
    body = layer * layers + dense * (layers - sparse) + _experts(config, width, inner, family.gated) * sparse + lead
    return Body(
        stacks=(Stack(layers=layers, products=body.products, width=heads * head, cache_width=kv_heads * head,
                      causal=True, windows=_windows(config, layers)),),
        weights=weights + body, features=embedding, embedding=embedding, head=family.head,
    )


def _sparse_layers(config: Any) -> int:
    """How many layers have experts in place of a feed-forward block."""
    if not first(config, "num_local_experts", "num_experts", "n_routed_experts", default=0):
        return 0
    step, dense = first(config, "decoder_sparse_step", default=1), first(config, "mlp_only_layers", default=[])
    return sum((i + 1) % step == 0 and i not in dense for i in range(config.num_hidden_layers))


def _experts(config: Any, width: int, inner: int, gated: bool) -> Weights:
    """One layer's router and experts, of which a token uses a few, and what all tokens share."""
    count = first(config, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    expert = feed_forward(width, first(config, "moe_intermediate_size", default=inner), gated, False)
    used = expert * first(config, "num_experts_per_tok", default=1)
    weights = linear(width, count) + Weights(expert.total * count, used.active, used.products)
    shared = first(config, "shared_expert_intermediate_size", default=0)
    return weights + (feed_forward(width, shared, gated, False) + linear(width, 1) if shared else Weights())


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    if first(config, "attention_layers"):  # GPT-Neo
        return tuple(config.window_size if kind == "local" else None for kind in config.attention_layers)
    window = first(config, "sliding_window")
    kinds = first(config, "layer_types", default=["sliding_attention"] * layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)

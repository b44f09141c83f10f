"""Llama, and the models of its shape, in JAX, with transformers' names and configuration."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tightfit.backends.jax.functions import linear, lookup, rms_norm
from tightfit.backends.jax.gpt2 import activation
from tightfit.backends.jax.network import Forward, Network, Params, Part, Weight, normal, ones, zeros
from tightfit.errors import ModelError
from tightfit.tasks import Array

LLAMA_LIKE = ("llama", "mistral", "qwen2")
"""The model types of this shape."""
PRODUCTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)


def llama(config: Any) -> Network:
    """The model of such a configuration. Raises ModelError for what is not here."""
    window = config.model_type == "mistral" or getattr(config, "use_sliding_window", False)
    if window and config.sliding_window is not None:
        raise ModelError(f"model: a sliding window of {config.sliding_window} is not in backend: jax; write "
                         "model_overrides.sliding_window=null, or backend=pytorch")
    width, heads, shared = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    eps, act, tied = config.rms_norm_eps, activation(config.hidden_act), config.tie_word_embeddings
    frequencies = rope_frequencies(config.rope_parameters, head_dim)

    def attention(params: Params, x: jax.Array, forward: Forward, key: jax.Array | None) -> jax.Array:
        normed = rms_norm(params, "input_layernorm", x, eps, forward.dtype)
        query, keys, value = (
            linear(params, name, normed, forward.dtype, name).reshape(*x.shape[:2], -1, head_dim)
            for name in PRODUCTS[:3]
        )
        together = forward.attend(
            rotated(query, forward.positions, frequencies), rotated(keys, forward.positions, frequencies), value,
            allowed=forward.allowed, causal=True, scale=head_dim**-0.5,
            dropout_rate=config.attention_dropout, dropout_key=key,
        )
        mixed = together.reshape(*x.shape[:2], heads * head_dim)
        return linear(params, PRODUCTS[3], mixed, forward.dtype, PRODUCTS[3])

    def mlp(params: Params, x: jax.Array, forward: Forward, key: jax.Array | None) -> jax.Array:
        normed = rms_norm(params, "post_attention_layernorm", x, eps, forward.dtype)
        gate, up = (linear(params, name, normed, forward.dtype, name) for name in PRODUCTS[4:6])
        return linear(params, PRODUCTS[6], act(gate) * up, forward.dtype, PRODUCTS[6])

    def embed(params: Params, ids: jax.Array, forward: Forward) -> jax.Array:
        return lookup(params["model.embed_tokens.weight"], ids, forward.dtype)

    def head(params: Params, x: jax.Array, forward: Forward) -> jax.Array:
        normed = rms_norm(params, "model.norm", x, eps, forward.dtype)
        table = params["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return normed @ table.astype(forward.dtype).T

    std, hidden = config.initializer_range, config.intermediate_size
    qwen = config.model_type == "qwen2"
    biased = qwen or getattr(config, "attention_bias", False)
    wide = getattr(config, "mlp_bias", False)
    sizes = {
        PRODUCTS[0]: (width, heads * head_dim, biased), PRODUCTS[1]: (width, shared * head_dim, biased),
        PRODUCTS[2]: (width, shared * head_dim, biased), PRODUCTS[3]: (heads * head_dim, width, biased and not qwen),
        PRODUCTS[4]: (width, hidden, wide), PRODUCTS[5]: (width, hidden, wide), PRODUCTS[6]: (hidden, width, wide),
    }
    layer = {f"{name}.weight": Weight((out, fan_in), normal(std)) for name, (fan_in, out, _) in sizes.items()}
    layer |= {f"{name}.bias": Weight((out,), zeros) for name, (_, out, has_bias) in sizes.items() if has_bias}
    layer |= {f"{name}.weight": Weight((width,), ones) for name in ("input_layernorm", "post_attention_layernorm")}
    return Network(
        config=config, depth=config.num_hidden_layers, outputs=config.vocab_size,
        weights={
            "model.embed_tokens.weight": Weight((config.vocab_size, width), normal(std)),
            **{f"model.layers.*.{name}": weight for name, weight in layer.items()},
            "model.norm.weight": Weight((width,), ones),
            **({} if tied else {"lm_head.weight": Weight((config.vocab_size, width), normal(std))}),
        },
        parts=(Part("attention", attention), Part("mlp", mlp)), products=PRODUCTS, embed=embed, head=head,
        attention_dropout="attention_dropout" if config.attention_dropout else None,
        stored_prefix="model.", unstored=(".rotary_emb.inv_freq",),
    )


def rope_frequencies(rope: dict[str, Any], head_dim: int) -> Array:
    """Radians a position for each pair of features, fp32 (head_dim / 2,). Raises ModelError for an unknown kind."""
    base = rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    frequencies: Array = (1.0 / base).astype(np.float32)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return frequencies
    if kind == "linear":
        return np.asarray(frequencies / rope["factor"], np.float32)
    if kind != "llama3":
        raise ModelError(f"model: rotary positions of type {kind!r} are not in backend: jax; write backend=pytorch")
    # Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated.
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    turns = context * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    stretched = (1 - smooth) * frequencies / rope["factor"] + smooth * frequencies
    return np.asarray(stretched, np.float32)


def rotated(x: jax.Array, positions: jax.Array, frequencies: Array) -> jax.Array:
    """`x` (B, T, heads, head_dim) turned by its positions (B, T), the two halves of features as pairs."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate((angles, angles), axis=-1)[:, :, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    other = jnp.concatenate((-second, first), axis=-1)
    return x * jnp.cos(angles).astype(x.dtype) + other * jnp.sin(angles).astype(x.dtype)

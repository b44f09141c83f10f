"""GPT-2 in JAX, with transformers' names and configuration."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from tightfit.backends.jax.functions import dropout, layer_norm, linear_in_out, lookup
from tightfit.backends.jax.network import Forward, Network, Params, Part, Weight, norm_weights, normal, zeros
from tightfit.errors import ModelError

PRODUCTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
ACTIVATIONS = {
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
"""Activation functions by transformers' names."""


def activation(name: str) -> Any:
    """The function of that name. Raises ModelError for one that is not here."""
    if name not in ACTIVATIONS:
        raise ModelError(f"model: backend: jax has no activation {name!r}; it has {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gpt2(config: Any) -> Network:
    """The model of a GPT2Config. Raises ModelError for what is not here."""
    if config.scale_attn_by_inverse_layer_idx or config.reorder_and_upcast_attn or config.add_cross_attention:
        raise ModelError("model: GPT-2 with scale_attn_by_inverse_layer_idx, reorder_and_upcast_attn or "
                         "add_cross_attention is not in backend: jax; write backend=pytorch")
    width, heads, eps = config.n_embd, config.n_head, config.layer_norm_epsilon
    head_dim, hidden = width // heads, config.n_inner or 4 * width
    act, tied = activation(config.activation_function), config.tie_word_embeddings
    scale = head_dim**-0.5 if config.scale_attn_weights else 1.0

    def attention(params: Params, x: jax.Array, forward: Forward, key: jax.Array | None) -> jax.Array:
        inner, outer = (None, None) if key is None else jax.random.split(key)
        normed = layer_norm(params, "ln_1", x, eps, forward.dtype)
        qkv = linear_in_out(params, PRODUCTS[0], normed, forward.dtype, PRODUCTS[0])
        query, keys, value = (a.reshape(*x.shape[:2], heads, head_dim) for a in jnp.split(qkv, 3, axis=-1))
        together = forward.attend(
            query, keys, value, allowed=forward.allowed, causal=True, scale=scale,
            dropout_rate=config.attn_pdrop, dropout_key=inner,
        )
        output = linear_in_out(params, PRODUCTS[1], together.reshape(x.shape), forward.dtype, PRODUCTS[1])
        return dropout(output, config.resid_pdrop, outer)

    def mlp(params: Params, x: jax.Array, forward: Forward, key: jax.Array | None) -> jax.Array:
        normed = layer_norm(params, "ln_2", x, eps, forward.dtype)
        wide = linear_in_out(params, PRODUCTS[2], normed, forward.dtype, PRODUCTS[2])
        output = linear_in_out(params, PRODUCTS[3], act(wide), forward.dtype, PRODUCTS[3])
        return dropout(output, config.resid_pdrop, key)

    def embed(params: Params, ids: jax.Array, forward: Forward) -> jax.Array:
        tokens = lookup(params["transformer.wte.weight"], ids, forward.dtype)
        x = tokens + lookup(params["transformer.wpe.weight"], forward.positions, forward.dtype)
        return dropout(x, config.embd_pdrop, forward.keys(0))

    def head(params: Params, x: jax.Array, forward: Forward) -> jax.Array:
        normed = layer_norm(params, "transformer.ln_f", x, eps, forward.dtype)
        table = params["transformer.wte.weight" if tied else "lm_head.weight"]
        return normed @ table.astype(forward.dtype).T

    std = config.initializer_range
    last = std / math.sqrt(2 * config.n_layer)
    layer = {
        **norm_weights("ln_1", width), **norm_weights("ln_2", width),
        **_dense(PRODUCTS[0], width, 3 * width, std), **_dense(PRODUCTS[1], width, width, last),
        **_dense(PRODUCTS[2], width, hidden, std), **_dense(PRODUCTS[3], hidden, width, last),
    }
    return Network(
        config=config, depth=config.n_layer, outputs=config.vocab_size,
        weights={
            "transformer.wte.weight": Weight((config.vocab_size, width), normal(std)),
            "transformer.wpe.weight": Weight((config.n_positions, width), normal(std)),
            **{f"transformer.h.*.{name}": weight for name, weight in layer.items()},
            **norm_weights("transformer.ln_f", width),
            **({} if tied else {"lm_head.weight": Weight((config.vocab_size, width), normal(std))}),
        },
        parts=(Part("attention", attention), Part("mlp", mlp)), products=PRODUCTS, embed=embed, head=head,
        attention_dropout="attn_pdrop" if config.attn_pdrop else None,
        stored_prefix="transformer.", unstored=(".attn.bias", ".attn.masked_bias"),
    )


def _dense(name: str, fan_in: int, features: int, std: float) -> dict[str, Weight]:
    return {
        f"{name}.weight": Weight((fan_in, features), normal(std)),
        f"{name}.bias": Weight((features,), zeros),
    }

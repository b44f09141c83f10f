"""The bundled transformer in JAX: pre-norm, learned positions, each layer's feed-forward block before attention.

Same parameters and same initial distributions as its PyTorch counterpart, so that the two can be compared.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tightfit.backends.jax.functions import dropout, layer_norm, linear, lookup
from tightfit.backends.jax.network import (
    Forward,
    Network,
    Params,
    Part,
    Weight,
    lecun_normal,
    norm_weights,
    normal,
    zeros,
)
from tightfit.models import TransformerConfig

NORM_EPS = 1e-6
PRODUCTS = ("mlp.input_layer", "mlp.output_layer", "attn.qkv", "attn.output_layer")


def transformer(config: TransformerConfig) -> Network:
    """The text transformer of that shape."""
    width, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
    hidden, mixed = config.mlp_expansion * width, heads * head_dim

    def mlp(params: Params, x: jax.Array, forward: Forward, key: jax.Array | None) -> jax.Array:
        normed = layer_norm(params, "mlp.pre_norm", x, NORM_EPS, forward.dtype)
        wide = linear(params, PRODUCTS[0], normed, forward.dtype, PRODUCTS[0])
        output = linear(params, PRODUCTS[1], jax.nn.gelu(wide, approximate=True), forward.dtype, PRODUCTS[1])
        return dropout(output, config.dropout_rate, key)

    def attention(params: Params, x: jax.Array, forward: Forward, key: jax.Array | None) -> jax.Array:
        normed = layer_norm(params, "attn.pre_norm", x, NORM_EPS, forward.dtype)
        # Each head's query, key and value lie side by side: (heads, 3 * head_dim).
        qkv = linear(params, PRODUCTS[2], normed, forward.dtype, PRODUCTS[2])
        query, keys, value = jnp.split(qkv.reshape(*x.shape[:2], heads, 3 * head_dim), 3, axis=-1)
        together = forward.attend(
            query, keys, value, allowed=forward.allowed, causal=config.causal_mask, scale=head_dim**-0.5
        )
        output = linear(params, PRODUCTS[3], together.reshape(*x.shape[:2], mixed), forward.dtype, PRODUCTS[3])
        return dropout(output, config.dropout_rate, key)

    def embed(params: Params, ids: jax.Array, forward: Forward) -> jax.Array:
        tokens = lookup(params["embed.weight"], ids, forward.dtype)
        return tokens + lookup(params["pos_emb"], forward.positions, forward.dtype)

    def head(params: Params, x: jax.Array, forward: Forward) -> jax.Array:
        normed = layer_norm(params, "post_norm", x, NORM_EPS, forward.dtype)
        return linear(params, "output_layer", normed, forward.dtype)

    layer = {
        **norm_weights("mlp.pre_norm", width), **norm_weights("attn.pre_norm", width),
        **_dense(PRODUCTS[0], width, hidden), **_dense(PRODUCTS[1], hidden, width),
        **_dense(PRODUCTS[2], width, 3 * mixed), **_dense(PRODUCTS[3], mixed, width),
    }
    return Network(
        config=config, depth=config.num_layers, outputs=config.num_outputs,
        weights={
            "pos_emb": Weight((config.max_seq_len, width), normal(0.02)),
            "embed.weight": Weight((config.vocab_size, width), normal(width**-0.5)),
            **{f"layers.*.{name}": weight for name, weight in layer.items()},
            **norm_weights("post_norm", width), **_dense("output_layer", width, config.num_outputs),
        },
        parts=(Part("mlp", mlp), Part("attention", attention)), products=PRODUCTS, embed=embed, head=head,
        causal=config.causal_mask, softmax_dtype=config.softmax_dtype,
    )


def _dense(name: str, fan_in: int, features: int) -> dict[str, Weight]:
    return {
        f"{name}.weight": Weight((features, fan_in), lecun_normal(fan_in)),
        f"{name}.bias": Weight((features,), zeros),
    }

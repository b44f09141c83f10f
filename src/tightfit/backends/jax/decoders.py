"""The decoders in JAX: the bundled transformer, GPT-2 and the models of Llama's shape, with the names and
configurations of their PyTorch counterparts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tightfit.backends.jax.network import (
    Branch,
    Forward,
    Network,
    Params,
    Weight,
    dropout,
    layer_norm,
    linear,
    rms_norm,
)
from tightfit.bundled import NORM_EPS, TRUNCATED_STD
from tightfit.errors import ModelError
from tightfit.models import TransformerConfig
from tightfit.tasks import Array

LLAMA_LIKE = ("llama", "mistral", "qwen2")
"""The model types of Llama's shape."""
FAMILIES = ("transformer-156m", "gpt2", *LLAMA_LIKE)
"""The models that are here."""
ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "gelu_new": partial(jax.nn.gelu, approximate=True), "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False), "relu": jax.nn.relu, "silu": jax.nn.silu,
}  # fmt: skip
"""Activation functions by transformers' names."""
ones, zeros, normal = jax.nn.initializers.ones, jax.nn.initializers.zeros, jax.nn.initializers.normal

Function = Callable[..., jax.Array]


def network_of(config: Any, task: str) -> Network:
    """The model that a configuration describes. Raises ModelError for one that has no counterpart here."""
    if isinstance(config, TransformerConfig):
        return transformer(config)
    makers = {"gpt2": gpt2, **dict.fromkeys(LLAMA_LIKE, llama)}
    if task != "causal-lm" or config.model_type not in makers:
        raise ModelError(f"model: backend: jax has no {task} model of type {config.model_type!r}; it has "
                         f"{', '.join(FAMILIES)} for causal-lm. Write backend=pytorch")
    return makers[config.model_type](config)


def transformer(config: TransformerConfig) -> Network:
    """The bundled text transformer: pre-norm, learned positions, each layer's feed-forward block before attention. The
    same parameters and initial distributions as its PyTorch counterpart's, so that the two can be compared."""
    width, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
    hidden, mixed = config.mlp_expansion * width, heads * head_dim
    products = ("mlp.input_layer", "mlp.output_layer", "attn.qkv", "attn.output_layer")
    norm = partial(layer_norm, eps=NORM_EPS)

    def project(params: Params, x: jax.Array, forward: Forward) -> list[jax.Array]:
        # Each head's query, key and value lie side by side: (heads, 3 * head_dim).
        qkv = linear(params, products[2], x, forward.dtype)
        return jnp.split(qkv.reshape(*x.shape[:2], heads, 3 * head_dim), 3, axis=-1)

    def expand(params: Params, x: jax.Array, forward: Forward) -> jax.Array:
        return jax.nn.gelu(linear(params, products[0], x, forward.dtype), approximate=True)

    def head(params: Params, x: jax.Array, forward: Forward) -> jax.Array:
        return linear(params, "output_layer", norm(params, "post_norm", x, forward.dtype), forward.dtype)

    def dense(name: str, fan_in: int, features: int) -> dict[str, Weight]:
        cut = jax.nn.initializers.truncated_normal(fan_in**-0.5 / TRUNCATED_STD)  # of variance 1 / fan_in
        return _dense(name, (features, fan_in), cut, features)

    layer = {
        **_norm_weights("mlp.pre_norm", width), **_norm_weights("attn.pre_norm", width),
        **dense(products[0], width, hidden), **dense(products[1], hidden, width),
        **dense(products[2], width, 3 * mixed), **dense(products[3], mixed, width),
    }
    return Network(
        config=config, depth=config.num_layers, outputs=config.num_outputs, products=products, head=head,
        weights={
            "pos_emb": Weight((config.max_seq_len, width), normal(0.02)),
            "embed.weight": Weight((config.vocab_size, width), normal(width**-0.5)),
            **{f"layers.*.{name}": weight for name, weight in layer.items()},
            **_norm_weights("post_norm", width), **dense("output_layer", width, config.num_outputs),
        },
        branches=(
            _feed_forward(partial(norm, name="mlp.pre_norm"), expand, partial(linear, name=products[1]),
                          config.dropout_rate),
            _attention(partial(norm, name="attn.pre_norm"), project, partial(linear, name=products[3]),
                       head_dim**-0.5, (None, config.dropout_rate), causal=config.causal_mask),
        ),
        embed=_embedding("embed.weight", "pos_emb"), softmax_dtype=config.softmax_dtype,
    )  # fmt: skip


def gpt2(config: Any) -> Network:
    """The model of a GPT2Config. Raises ModelError for what is not here."""
    if config.scale_attn_by_inverse_layer_idx or config.reorder_and_upcast_attn or config.add_cross_attention:
        raise ModelError("model: GPT-2 with scale_attn_by_inverse_layer_idx, reorder_and_upcast_attn or "
                         "add_cross_attention is not in backend: jax; write backend=pytorch")
    width, heads, tied = config.n_embd, config.n_head, config.tie_word_embeddings
    head_dim, hidden = width // heads, config.n_inner or 4 * width
    act, norm = _activation(config.activation_function), partial(layer_norm, eps=config.layer_norm_epsilon)
    products, conv1d = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), partial(linear, in_out=True)

    def project(params: Params, x: jax.Array, forward: Forward) -> list[jax.Array]:
        qkv = conv1d(params, products[0], x, forward.dtype)
        return [part.reshape(*x.shape[:2], heads, head_dim) for part in jnp.split(qkv, 3, axis=-1)]

    def expand(params: Params, x: jax.Array, forward: Forward) -> jax.Array:
        return act(conv1d(params, products[2], x, forward.dtype))

    std = config.initializer_range
    last = std / math.sqrt(2 * config.n_layer)
    table = Weight((config.vocab_size, width), normal(std))
    layer = {**_norm_weights("ln_1", width), **_norm_weights("ln_2", width)}
    for name, fan_in, features, deviation in zip(
        products, (width, width, width, hidden), (3 * width, width, hidden, width), (std, last, std, last), strict=True
    ):
        layer |= _dense(name, (fan_in, features), normal(deviation), features)
    return Network(
        config=config, depth=config.n_layer, outputs=config.vocab_size, products=products,
        weights={
            "transformer.wte.weight": table,
            "transformer.wpe.weight": Weight((config.n_positions, width), normal(std)),
            **{f"transformer.h.*.{name}": weight for name, weight in layer.items()},
            **_norm_weights("transformer.ln_f", width), **({} if tied else {"lm_head.weight": table}),
        },
        branches=(
            _attention(partial(norm, name="ln_1"), project, partial(conv1d, name=products[1]),
                       head_dim**-0.5 if config.scale_attn_weights else 1.0, (config.attn_pdrop, config.resid_pdrop)),
            _feed_forward(partial(norm, name="ln_2"), expand, partial(conv1d, name=products[3]),
                          config.resid_pdrop),
        ),
        embed=_embedding("transformer.wte.weight", "transformer.wpe.weight", config.embd_pdrop),
        head=_head(partial(norm, name="transformer.ln_f"), "transformer.wte.weight" if tied else "lm_head.weight"),
        attention_dropout="attn_pdrop" if config.attn_pdrop else None,
        stored_prefix="transformer.", unstored=(".attn.bias", ".attn.masked_bias"),
    )  # fmt: skip


def llama(config: Any) -> Network:
    """The model of a configuration of Llama's shape. Raises ModelError for what is not here."""
    slides = config.model_type == "mistral" or getattr(config, "use_sliding_window", False)
    if slides and config.sliding_window is not None:
        raise ModelError(f"model: a sliding window of {config.sliding_window} is not in backend: jax; write "
                         "model_overrides.sliding_window=null, or backend=pytorch")
    width, heads, tied = config.hidden_size, config.num_attention_heads, config.tie_word_embeddings
    head_dim = getattr(config, "head_dim", None) or width // heads
    act, norm = _activation(config.hidden_act), partial(rms_norm, eps=config.rms_norm_eps)
    frequencies = rope_frequencies(config.rope_parameters, head_dim)
    products = (*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

    def project(params: Params, x: jax.Array, forward: Forward) -> list[jax.Array]:
        query, keys, value = (
            linear(params, name, x, forward.dtype).reshape(*x.shape[:2], -1, head_dim) for name in products[:3]
        )
        return [*(_apply_rope(each, forward.positions, frequencies) for each in (query, keys)), value]

    def expand(params: Params, x: jax.Array, forward: Forward) -> jax.Array:
        gate, up = (linear(params, name, x, forward.dtype) for name in products[4:6])
        return act(gate) * up

    hidden, qwen = config.intermediate_size, config.model_type == "qwen2"
    biased, wide = qwen or getattr(config, "attention_bias", False), getattr(config, "mlp_bias", False)
    queries, shared = heads * head_dim, config.num_key_value_heads * head_dim
    init = normal(config.initializer_range)
    sizes = ((queries, width), (shared, width), (shared, width), (width, queries),
             (hidden, width), (hidden, width), (width, hidden))
    biases = (biased, biased, biased, biased and not qwen, wide, wide, wide)
    layer = {f"{name}.weight": Weight((width,), ones) for name in ("input_layernorm", "post_attention_layernorm")}
    for name, size, has_bias in zip(products, sizes, biases, strict=True):
        layer |= _dense(name, size, init, size[0] if has_bias else None)
    table = Weight((config.vocab_size, width), init)
    return Network(
        config=config, depth=config.num_hidden_layers, outputs=config.vocab_size, products=products,
        weights={
            "model.embed_tokens.weight": table,
            **{f"model.layers.*.{name}": weight for name, weight in layer.items()},
            "model.norm.weight": Weight((width,), ones), **({} if tied else {"lm_head.weight": table}),
        },
        branches=(
            _attention(partial(norm, name="input_layernorm"), project, partial(linear, name=products[3]),
                       head_dim**-0.5, (config.attention_dropout, None)),
            _feed_forward(partial(norm, name="post_attention_layernorm"), expand, partial(linear, name=products[6])),
        ),
        embed=_embedding("model.embed_tokens.weight"),
        head=_head(partial(norm, name="model.norm"), "model.embed_tokens.weight" if tied else "lm_head.weight"),
        attention_dropout="attention_dropout" if config.attention_dropout else None,
        stored_prefix="model.", unstored=(".rotary_emb.inv_freq",),
    )  # fmt: skip


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


def _attention(norm: Function, project: Callable[..., list[jax.Array]], output: Function, scale: float,
               rates: tuple[float | None, float | None], causal: bool = True) -> Branch:
    """The attention branch.

    project: (parameters, normed (B, T, width), forward) -> query, key and value, each (B, T, its heads, head_dim).
    rates: dropout of the attention weights and of the result; None where the model has no such dropout.
    """

    def attention(params: Params, x: jax.Array, forward: Forward, key: jax.Array | None) -> jax.Array:
        inner = outer = key
        if key is not None and None not in rates:
            inner, outer = jax.random.split(key)
        query, keys, value = project(params, norm(params, x=x, dtype=forward.dtype), forward)
        mixed = forward.attention_fn(query, keys, value, mask=forward.mask, causal=causal, scale=scale,
                               dropout_rate=rates[0] or 0.0, dropout_key=inner)
        mixed = mixed.reshape(*x.shape[:2], -1)
        return dropout(output(params, x=mixed, dtype=forward.dtype), rates[1], outer)

    return Branch("attention", attention)


def _feed_forward(norm: Function, expand: Function, output: Function, rate: float = 0.0) -> Branch:
    """The feed-forward branch. expand: (parameters, normed (B, T, width), forward) -> (B, T, hidden), activated."""

    def mlp(params: Params, x: jax.Array, forward: Forward, key: jax.Array | None) -> jax.Array:
        wide = expand(params, norm(params, x=x, dtype=forward.dtype), forward)
        return dropout(output(params, x=wide, dtype=forward.dtype), rate, key)

    return Branch("mlp", mlp)


def _embedding(tokens: str, positions: str | None = None, rate: float = 0.0) -> Function:
    """Rows of the table `tokens`, plus those of `positions` where the model learns its positions."""

    def embed(params: Params, ids: jax.Array, forward: Forward) -> jax.Array:
        x = jnp.take(params[tokens].astype(forward.dtype), ids, axis=0)
        if positions is not None:
            x = x + jnp.take(params[positions].astype(forward.dtype), forward.positions, axis=0)
        return dropout(x, rate, forward.keys(0) if rate else None)

    return embed


def _head(norm: Function, table: str) -> Function:
    def head(params: Params, x: jax.Array, forward: Forward) -> jax.Array:
        normed = norm(params, x=x, dtype=forward.dtype)
        return normed @ params[table].astype(forward.dtype).T

    return head


def _activation(name: str) -> Function:
    if name not in ACTIVATIONS:
        raise ModelError(f"model: backend: jax has no activation {name!r}; it has {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _dense(name: str, shape: tuple[int, int], init: Any, bias: int | None) -> dict[str, Weight]:
    """A matrix, and the vector of `bias` zeros that its product is added to."""
    found = {f"{name}.weight": Weight(shape, init)}
    return found if bias is None else {**found, f"{name}.bias": Weight((bias,), zeros)}


def _norm_weights(name: str, width: int) -> dict[str, Weight]:
    """A layer normalization's weight and bias."""
    return {f"{name}.weight": Weight((width,), ones), f"{name}.bias": Weight((width,), zeros)}


def _apply_rope(x: jax.Array, positions: jax.Array, frequencies: Array) -> jax.Array:
    """`x` (B, T, heads, head_dim) turned by its positions (B, T), the two halves of features as pairs."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate((angles, angles), axis=-1)[:, :, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    other = jnp.concatenate((-second, first), axis=-1)
    return x * jnp.cos(angles).astype(x.dtype) + other * jnp.sin(angles).astype(x.dtype)

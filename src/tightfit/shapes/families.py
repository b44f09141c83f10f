"""Which family a configuration belongs to, and the weights of those that are not plain decoders.

Counts are those of the classes in transformers 5; a configuration is any object with their attributes, such as
`hidden_size` and `num_hidden_layers`. No framework is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tightfit.shapes.decoders import DECODERS, LLAMA, PLAIN, decoder
from tightfit.shapes.parts import Body, Stack, Weights, attention, feed_forward, first, linear, plain


def encoder(config: Any) -> Body:
    """BERT and its descendants; causal where `is_decoder` says so."""
    width, kind = config.hidden_size, config.model_type
    shared = kind == "albert"  # a few layers' weights, counted once and multiplied by in every layer
    layers = config.num_hidden_layers * (config.inner_group_num if shared else 1)
    embedding = first(config, "embedding_size", default=width)
    types = 0 if kind == "distilbert" else first(config, "type_vocab_size", default=0)
    positions = config.max_position_embeddings if first(config, "position_biased_input", default=True) else 0
    deberta = kind.startswith("deberta")
    weights = plain((config.vocab_size + positions + types) * embedding + 2 * (width if deberta else embedding))
    lead = Weights()
    if embedding != width or shared:
        lead = linear(embedding, width, not deberta)
    inner = first(config, "hidden_dim", "intermediate_size")
    layer = attention(width, 1, 1, width, True, True) + feed_forward(width, inner, False, True) + plain(4 * width)
    relative = (0, 0, False)
    if kind == "deberta":
        layer += plain(-width)  # queries and values have biases, keys do not
    if deberta and config.relative_attention:
        kinds, span = first(config, "pos_att_type", default=[]), first(config, "max_relative_positions", default=-1)
        span = span if span > 0 else config.max_position_embeddings
        if kind == "deberta":
            layer += plain(width * width) * ("c2p" in kinds) + plain(width * width + width) * ("p2c" in kinds)
        else:
            span = config.position_buckets if first(config, "position_buckets", default=-1) > 0 else span
            own = 0 if first(config, "share_att_key", default=False) else len(kinds)
            layer += plain(width * width + width) * own
            weights += plain(2 * width) * ("layer_norm" in str(first(config, "norm_rel_ebd", default="none")))
        weights += plain(2 * span * width)
        relative = (len(kinds), 2 * span, kind == "deberta")
    kernel = first(config, "conv_kernel_size", default=0) if kind == "deberta-v2" else 0
    if kernel:
        lead += linear(width * kernel // first(config, "conv_groups", default=1), width, True) + plain(2 * width)
    body = layer * (config.num_hidden_groups * config.inner_group_num if shared else layers) + lead
    return Body(
        stacks=(Stack(layers=layers, products=layer.products * layers + lead.products, width=width, cache_width=width,
                      causal=bool(first(config, "is_decoder", default=False)), relative=relative),),
        weights=weights + body, features=width, embedding=embedding, head="masked",
    )


def t5(config: Any) -> Body:
    """T5 and its descendants: no biases, positions by a bias for each head in the first layer of either stack."""
    width, heads, head = config.d_model, config.num_heads, config.d_kv
    mix = attention(width, heads, heads, head, False, False)
    mlp = feed_forward(width, config.d_ff, config.is_gated_act, False)
    return _encoder_decoder(
        width, heads * head, (config.num_layers, config.num_decoder_layers), (mlp, mlp), mix, plain(width),
        plain(config.vocab_size * width + 2 * config.relative_attention_num_buckets * heads) + plain(width) * 2,
    )


def bart(config: Any) -> Body:
    """BART: learned positions from the third row on, a norm behind each embedding."""
    width = config.d_model
    mlps = [feed_forward(width, inner, False, True) for inner in (config.encoder_ffn_dim, config.decoder_ffn_dim)]
    return _encoder_decoder(
        width, width, (config.encoder_layers, config.decoder_layers), (mlps[0], mlps[1]),
        attention(width, 1, 1, width, True, True), plain(2 * width),
        plain((config.vocab_size + 2 * (config.max_position_embeddings + 2) + 4) * width),
    )


def whisper(config: Any) -> Body:
    """Whisper: two convolutions over a spectrogram of twice as many frames as the encoder has positions."""
    width, frames = config.d_model, config.max_source_positions
    mlps = [feed_forward(width, inner, False, True) for inner in (config.encoder_ffn_dim, config.decoder_ffn_dim)]
    second = linear(3 * width, width, True)
    stem = linear(3 * config.num_mel_bins, width, True)
    return _encoder_decoder(
        width, width, (config.encoder_layers, config.decoder_layers), (mlps[0], mlps[1]),
        attention(width, 1, 1, width, True, True) + plain(-width), plain(2 * width),  # keys have no bias
        plain((config.vocab_size + frames + config.max_target_positions + 4) * width) + second + plain(stem.total),
        lead=second.products, positions=frames, stem=(stem.products, 2 * frames),
    )


def _encoder_decoder(width: int, inner: int, layers: tuple[int, int], mlps: tuple[Weights, Weights], mix: Weights,
                     norm: Weights, around: Weights, lead: int = 0, positions: int | None = None,
                     stem: tuple[int, int] = (0, 0)) -> Body:
    """Encoder layers of attention and a feed-forward block, decoder layers with cross-attention between the two."""
    encoding, decoding = mix + mlps[0] + norm * 2, mix * 2 + mlps[1] + norm * 3
    read = 2 * width * inner  # cross-attention's keys and values, computed from the encoder's positions
    return Body(
        stacks=(
            Stack(layers=layers[0], products=encoding.products * layers[0] + lead, width=inner, cache_width=0,
                  positions=positions, stem=stem),
            Stack(layers=layers[1], products=(decoding.products - read) * layers[1], width=inner, cache_width=inner,
                  causal=True, source_products=read * layers[1]),
        ),
        weights=encoding * layers[0] + decoding * layers[1] + around, features=width, embedding=width,
    )


def vit(config: Any) -> Body:
    """ViT: patches as tokens, behind one more that the class is read from."""
    width, layers = config.hidden_size, config.num_hidden_layers
    size, patch = (side if isinstance(side, int) else side[0] for side in (config.image_size, config.patch_size))
    patches = (size // patch) ** 2
    stem = linear(config.num_channels * patch**2, width, True)
    layer = (attention(width, 1, 1, width, config.qkv_bias, True)
             + feed_forward(width, config.intermediate_size, False, True) + plain(4 * width))
    return Body(
        stacks=(Stack(layers=layers, products=layer.products * layers, width=width, cache_width=0,
                      positions=patches + 1, stem=(stem.products, patches)),),
        weights=layer * layers + plain(stem.total + (patches + 2) * width + 2 * width), features=width, embedding=width,
        head="image",
    )


def bundled_transformer(config: Any) -> Body:
    """The bundled `transformer-156m` and its changes."""
    width, layers, inner = config.hidden_size, config.num_layers, config.num_heads * config.head_dim
    layer = (attention(width, config.num_heads, config.num_heads, config.head_dim, True, True)
             + feed_forward(width, config.mlp_expansion * width, False, True) + plain(4 * width))
    return Body(
        stacks=(Stack(layers=layers, products=layer.products * layers, width=inner, cache_width=inner,
                      causal=config.causal_mask),),
        weights=layer * layers + plain((config.vocab_size + config.max_seq_len + 2) * width), features=width,
        embedding=width, head="lm-bias",
    )


ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "distilbert", "deberta", "deberta-v2")
FAMILIES: dict[str, Callable[[Any], Body]] = {
    **dict.fromkeys(ENCODERS, encoder), "t5": t5, "mt5": t5, "bart": bart, "whisper": whisper, "vit": vit,
    "tightfit-transformer": bundled_transformer,
}


def body_of(config: Any) -> Body | None:
    """The body of a model of a known family; None for any other."""
    kind = "tightfit-transformer" if hasattr(config, "mlp_expansion") else getattr(config, "model_type", "")
    if kind in DECODERS:
        return decoder(config, DECODERS[kind])
    return FAMILIES[kind](config) if kind in FAMILIES else None


def guess(config: Any) -> Body | None:
    """A body by the usual names of its numbers, for a family that is not known; None where they are missing.

    Gated and without biases where it has RMS norms or SiLU, as Llama's descendants do; else as GPT-2's.
    """
    if getattr(config, "is_encoder_decoder", False) and hasattr(config, "decoder_ffn_dim"):
        return bart(config)
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if any(not isinstance(getattr(config, name, None), int) for name in needed):
        return None
    gated = hasattr(config, "rms_norm_eps") or getattr(config, "hidden_act", "") == "silu"
    return decoder(config, LLAMA if gated else PLAIN)

"""The bundled transformer in PyTorch: pre-norm, learned positions, each layer's feed-forward block before attention.

Same parameters and same initial distributions as its JAX counterpart, so that the two can be compared.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tightfit.backends.pytorch.techniques.attention.functions import FUNCTIONS, SDPA
from tightfit.bundled import NORM_EPS, TRUNCATED_STD
from tightfit.errors import ModelError
from tightfit.models import OUR_TRANSFORMER, TransformerConfig


class TransformerOutput(NamedTuple):
    """logits: (B, T, num_outputs), at least fp32."""

    logits: Tensor


class MlpBlock(nn.Module):
    """Normalization, a layer `mlp_expansion` times as wide with GELU, and back: (B, T, hidden) to the same."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        width = config.mlp_expansion * config.hidden_size
        self.pre_norm = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.input_layer = nn.Linear(config.hidden_size, width)
        self.output_layer = nn.Linear(width, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.input_layer(self.pre_norm(x)), approximate="tanh")
        output: Tensor = self.dropout(self.output_layer(hidden))
        return output


class AttentionBlock(nn.Module):
    """Normalization and self-attention, (B, T, hidden) to the same. The kernel is the one that
    `config._attn_implementation` names when called."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.is_causal = config.causal_mask
        self.scaling = config.head_dim**-0.5
        width = config.num_heads * config.head_dim
        self.pre_norm = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.qkv = nn.Linear(config.hidden_size, 3 * width)
        self.output_layer = nn.Linear(width, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        rows, length, _ = x.shape
        # Each head's query, key and value lie side by side: (heads, 3 * head_dim).
        heads = self.qkv(self.pre_norm(x)).view(rows, length, self.config.num_heads, -1).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=-1)
        attend = FUNCTIONS[self.config._attn_implementation]
        mixed, _ = attend(
            self, query, key, value, attention_mask,
            dropout=0.0, scaling=self.scaling, is_causal=self.is_causal, **kwargs,
        )
        output: Tensor = self.dropout(self.output_layer(mixed.reshape(rows, length, -1)))
        return output


class Layer(nn.Module):
    """One layer: what the feed-forward block gives is added, then what attention gives."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.mlp = MlpBlock(config)
        self.attn = AttentionBlock(config)

    def forward(self, x: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        x = x + self.mlp(x)
        output: Tensor = x + self.attn(x, attention_mask, **kwargs)
        return output


class Transformer(nn.Module):
    """A text transformer over (B, T) token ids.

    `config` holds the shape's numbers, `model_type`, and `_attn_implementation`, the attention function in use, which
    may be changed at any time. Raises ModelError for a softmax in a format other than float32.
    """

    def __init__(self, shape: TransformerConfig) -> None:
        super().__init__()
        if shape.softmax_dtype != "float32":
            raise ModelError(f"model_overrides.softmax_dtype: {shape.softmax_dtype!r} is not what PyTorch's attention "
                             "kernels compute in; write float32")
        self.shape = shape
        self.config = config = SimpleNamespace(**asdict(shape), model_type=OUR_TRANSFORMER, _attn_implementation=SDPA)
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.pos_emb = nn.Parameter(torch.empty(shape.max_seq_len, shape.hidden_size))
        self.layers = nn.ModuleList(Layer(config) for _ in range(shape.num_layers))
        self.post_norm = nn.LayerNorm(shape.hidden_size, eps=NORM_EPS)
        self.output_layer = nn.Linear(shape.hidden_size, shape.num_outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: LeCun-normal matrices (cut off at two standard deviations), zero biases."""
        nn.init.normal_(self.embed.weight, std=self.shape.hidden_size**-0.5)
        nn.init.normal_(self.pos_emb, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                _lecun_normal_(module.weight, module.in_features)
                nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def get_output_embeddings(self) -> nn.Linear:
        return self.output_layer

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Tensor | None = None, **kwargs: Any
    ) -> TransformerOutput:
        """input_ids, position_ids: (B, T) int64; without `position_ids` every row counts from 0.

        attention_mask: a mask of `techniques.attention.masks`, or (B, T), nonzero on real tokens; what else is given
            goes to the attention function.
        """
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            attention_mask = attention_mask[:, None, None, :].bool()
        positions = self.pos_emb[: input_ids.shape[1]] if position_ids is None else self.pos_emb[position_ids]
        x = self.embed(input_ids) + positions
        for layer in self.layers:
            x = layer(x, attention_mask, **kwargs)
        logits = self.output_layer(self.post_norm(x))
        return TransformerOutput(logits.to(torch.promote_types(logits.dtype, torch.float32)))


@torch.no_grad()
def _lecun_normal_(weight: Tensor, fan_in: int) -> None:
    """Fill with a normal distribution cut off at two of its deviations, of variance 1 / `fan_in`.

    By the inverse of the normal's distribution: torch's own `trunc_normal_` looks at the values it drew, which fake
    tensors do not have.
    """
    std = math.sqrt(1 / fan_in) / TRUNCATED_STD
    mass = math.erf(math.sqrt(2))
    drawn = torch.empty_like(weight, dtype=torch.float32)  # half precision has too few steps near the ends
    drawn.uniform_(-mass, mass).erfinv_().mul_(math.sqrt(2) * std).clamp_(-2 * std, 2 * std)
    weight.copy_(drawn)

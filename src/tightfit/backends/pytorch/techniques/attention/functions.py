"""The attention functions of ours that models call: eager, SDPA, FlexAttention.

Each has the signature that transformers asks of an attention function: query (B, H, T, D), key and value
(B, heads for keys, K, D), a mask of `masks`, and returns (B, T, H, D), contiguous, and None for the weights.
What a kernel cannot honour is refused, never ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from tightfit.backends.pytorch.simulated_device import active_simulated_cuda, stands_for_cuda
from tightfit.backends.pytorch.techniques.attention.kernels import (
    HALF,
    compute_dtype,
    packed_way,
    repeat_heads,
    sdpa,
    slices,
    varlen,
)
from tightfit.backends.pytorch.techniques.attention.masks import (
    additive_mask,
    asks_causality,
    dense_mask,
    is_key_mask,
    is_packed,
    is_plain,
    mask_function,
)
from tightfit.errors import ModelError

AttentionFunction = Callable[..., tuple[Tensor, None]]

EAGER = "tightfit_eager"
SDPA = "tightfit_sdpa"
FLEX = "tightfit_flex"
FLEX_FEATURES = 16
"""Features of a head below which Inductor compiles no FlexAttention (torch/_inductor/kernel/flex)."""
FLEX_BLOCK = 128
"""Positions on each side of a FlexAttention block."""


def register() -> None:
    """Make our functions known to transformers by name. Doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flex_attention_mask

    for name, function in FUNCTIONS.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, flex_attention_mask if name == FLEX else mask_function)


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
    position_bias: Tensor | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Matrix products and a softmax, in fp32 for half-precision scores. `s_aux` (H,) are learned sinks: scores that
    take part in the softmax and attend to nothing."""
    _refuse("eager", kwargs)
    key, value = repeat_heads(query, key, value)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias
    causal = _is_causal(module, query, key, attention_mask, is_causal)
    mask = dense_mask(attention_mask, query, causal, _window(module, query, causal, sliding_window))
    if mask is not None:
        hidden = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if hidden else scores + mask
    keys = scores.shape[-1]
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)], dim=-1)
    wide = torch.float32 if scores.dtype in HALF else scores.dtype
    weights = scores.softmax(dim=-1, dtype=wide)[..., :keys].to(value.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), None


def sdpa_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
    position_bias: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """PyTorch's scaled_dot_product_attention. Packed documents never cost a T x T mask where another way exists: see
    `packed_way`."""
    _refuse("sdpa", kwargs)
    causal = _is_causal(module, query, key, attention_mask, is_causal)
    window = _window(module, query, causal, sliding_window)
    if is_packed(attention_mask):
        assert attention_mask is not None
        way = packed_way(query, value, attention_mask, dropout, position_bias)
        if way == "rows":
            attention_mask = None
        elif way != "dense":
            kernel = varlen if way == "varlen" else slices
            return kernel(query, key, value, attention_mask.flatten(), causal, window, dropout, scaling), None
    elif causal and is_key_mask(attention_mask, query):
        attention_mask = None  # padding follows the real tokens, so that causality already hides it from them
    simple = is_plain(attention_mask) and window is None and position_bias is None
    mask = None if simple else dense_mask(attention_mask, query, causal, window)
    if position_bias is not None:
        dtype = position_bias.dtype
        bias = mask if mask is None or mask.dtype != torch.bool else additive_mask(mask, dtype)
        mask = (position_bias if bias is None else position_bias + bias).to(query.dtype)
    return sdpa(query, key, value, mask, causal and simple, dropout, scaling).transpose(1, 2).contiguous(), None


def flex_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
    softcap: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """PyTorch's FlexAttention, compiled. The mask is a BlockMask, or says nothing."""
    _refuse("flex", {**kwargs, "dropout": dropout or None})
    causal = _is_causal(module, query, key, attention_mask, is_causal)
    window = _window(module, query, causal, sliding_window)
    if is_plain(attention_mask) or (causal and is_key_mask(attention_mask, query)):
        plain = not causal and window is None
        attention_mask = None if plain else near_blocks(query.shape[2], causal, window, query.device)
    elif isinstance(attention_mask, Tensor):
        raise ModelError("attention: 'flex' was given a mask of numbers instead of a block mask; write attention=sdpa")
    elif window is not None:
        raise ModelError(f"attention: 'flex' does not combine a sliding window of {window} tokens with documents or "
                         "padding yet; write attention=sdpa")

    planned = stands_for_cuda(query)
    if (planned or query.device.type == "cuda") and (features := min(query.shape[-1], value.shape[-1])) < FLEX_FEATURES:
        raise ModelError(f"attention: 'flex' wants heads of at least {FLEX_FEATURES} features on a GPU, and this "
                         f"model's have {features}; write attention=sdpa")
    query, key, value = (t.to(compute_dtype(query)) for t in (query, key, value))
    if planned:
        return _planned_flex(query, key, value, causal, scaling).transpose(1, 2).contiguous(), None
    kernel: Any = flex.flex_attention if torch.compiler.is_compiling() else _compiled(flex.flex_attention)
    output: Tensor = kernel(
        query, key, value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


FUNCTIONS: dict[str, AttentionFunction] = {EAGER: eager_attention, SDPA: sdpa_attention, FLEX: flex_attention}

UNSERVED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "indices", "block_indices", "dropout")
"""Arguments that change the result: a function that gets one it does not name must refuse."""


def _refuse(name: str, kwargs: dict[str, Any]) -> None:
    for argument in UNSERVED_ARGUMENTS:
        if kwargs.get(argument) is not None:
            instead = "write attention=auto" if name == "eager" else "write attention=eager"
            raise ModelError(f"attention: {name!r} cannot serve this model's {argument}; {instead}")


def _is_causal(module: nn.Module, query: Tensor, key: Tensor, mask: Any, is_causal: bool | None) -> bool:
    """Whether this call is causal: its mask asks for it, or the call or the module says so. Over keys of another
    length it is not: those are another sequence's."""
    flag = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return (asks_causality(mask) or bool(flag)) and query.shape[2] == key.shape[2] and query.shape[2] > 1


def _window(module: nn.Module, query: Tensor, causal: bool, sliding_window: int | None) -> int | None:
    """The sliding window of `distance_mask`, where the sequence is longer.

    In both directions, transformers' masks see the configuration's number of tokens on each side. ModernBERT hands its
    attention one more for that; T5Gemma hands the number itself.
    """
    if sliding_window is None:
        return None
    both = not causal and sliding_window == getattr(getattr(module, "config", None), "sliding_window", None)
    window = sliding_window + 1 if both else sliding_window
    return window if query.shape[2] > window else None


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return capped


def _planned_flex(query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float | None) -> Tensor:
    """FlexAttention on fake tensors that stand for CUDA ones, whose backward pass torch refuses on the CPU: it keeps
    what the flash kernel keeps."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    output: Tensor = flash(query, key, value, 0.0, causal, scale=scaling)[0]
    return output[..., : value.shape[-1]]


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def create_blocks(allowed: Callable[..., Tensor], rows: int | None, length: int, device: torch.device) -> Any:
    """The BlockMask (rows or 1, 1, length, length) of the pairs that `allowed(row, head, q, k)` lets attend.

    On CUDA it is made by a compiled kernel: uncompiled, all rows * length * length pairs would stand in memory.
    """
    if not torch.compiler.is_compiling() and active_simulated_cuda() is not None:
        blocks = _planned_blocks(allowed, rows or 1, length, device)
    else:
        compiled = device.type == "cuda" and not torch.compiler.is_compiling()
        create: Any = _compiled(flex.create_block_mask) if compiled else flex.create_block_mask
        blocks = create(allowed, rows, None, length, length, device=str(device))
    blocks.ndim = 4  # transformers' GPT-2 asks a mask for it before it looks what the mask is
    return blocks


def _planned_blocks(allowed: Callable[..., Tensor], rows: int, length: int, device: torch.device) -> Any:
    """A BlockMask of that size, with nothing in it, for fake tensors that stand for CUDA ones."""
    count = -(-length // FLEX_BLOCK)
    numbers = [torch.zeros((rows, 1, count), dtype=torch.int32, device=device) for _ in range(2)]
    indices = [torch.zeros((rows, 1, count, count), dtype=torch.int32, device=device) for _ in range(2)]
    return flex.BlockMask.from_kv_blocks(
        numbers[0], indices[0], numbers[1], indices[1], FLEX_BLOCK, allowed, seq_lengths=(length, length)
    )


def near_blocks(length: int, causal: bool, window: int | None, device: torch.device) -> Any:
    """The BlockMask of causality and a sliding window, the same for every row."""

    def near(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = q >= k if causal else q == q
        return allowed if window is None else allowed & ((q - k).abs() < window)

    return create_blocks(near, None, length, device)


KERNELS: tuple[tuple[str, str], ...] = (
    ("torch_attn::_varlen_attn", "variable-length flash"),
    ("_scaled_dot_product_flash_attention_for_cpu", "sdpa flash (CPU)"),
    ("_scaled_dot_product_flash_attention", "sdpa flash"),
    ("_scaled_dot_product_efficient_attention", "sdpa efficient"),
    ("_scaled_dot_product_cudnn_attention", "sdpa cuDNN"),
    ("_scaled_dot_product_attention_math", "sdpa math (unfused)"),
    ("flex_attention", "flex"),
    ("flash_attn::", "flash-attn"),
    ("FlashAttn", "flash-attn"),
)
"""Parts of the profiler's op names, most particular first, and the kernel each gives away."""
DENSE_MASK = "a T x T mask keeps the packed documents apart"
DENSE_MASK_OP = "aten::bucketize"
"""The op that `masks.document_mask`, and no fused kernel, begins with."""


def kernel_names(events: Iterable[str]) -> list[str]:
    """The attention kernels that ran, from the op names a profiler saw in a forward pass; a softmax and no fused
    kernel is eager attention; empty where nothing shows, as inside fully compiled regions. A T x T mask of packed
    documents, which a fused kernel was to avoid, is named as well."""
    names = list(events)
    found = {next((kernel for part, kernel in KERNELS if part in name), "") for name in names if "backward" not in name}
    fused = sorted(found - {""})
    if not fused and any(name == "aten::_softmax" for name in names):
        return ["eager (matrix products and a softmax)"]
    return [*fused, DENSE_MASK] if fused and DENSE_MASK_OP in names else fused

"""Masks that our attention functions read: the positions that may see each other.

A mask is typed by what it is, so that no attention function has to look at its values:

    None, or last dimension 0   nothing beyond the module's own causality
    int32 (1, 1, 0, 0)          causality, whatever the module says of itself
    int32 (1, 1, 1, N + 1)      where each of N documents begins in the flattened (B * T) tokens, ending with B * T
    bool (B, 1, 1, K)           the keys that are real; padding follows the real tokens of a row
    bool (B, 1, Q, K)           every pair that may attend, causality included
    float (B, 1 or H, Q, K)     what is added to the scores, causality included
    BlockMask (B, 1, Q, K)      FlexAttention's own form, causality included

transformers hands a four-dimensional mask to every layer as it is, on real and on fake tensors alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tightfit.backends.pytorch.batch import TensorBatch


def is_plain(mask: Any) -> bool:
    """Whether the mask says nothing beyond causality."""
    return mask is None or mask.shape[-1] == 0


def asks_causality(mask: Any) -> bool:
    """Whether the mask asks for causality, so that the module need not: UMT5's decoder says of itself it is not."""
    return mask is not None and mask.shape[-1] == 0 and mask.shape[-2] == 0


def is_packed(mask: Any) -> bool:
    """Whether the mask holds the documents' starts."""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.shape[-1] > 0


def is_key_mask(mask: Any, query: Tensor) -> bool:
    """Whether the mask says only which keys are real."""
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape[-2] == 1 and query.shape[2] > 1


def plain_mask(device: torch.device) -> Tensor:
    """The mask that says nothing: transformers would make one of its own for None."""
    return torch.empty((1, 1, 1, 0), dtype=torch.int32, device=device)


def causal_mask(device: torch.device) -> Tensor:
    """The mask that says causality and nothing else."""
    return torch.empty((1, 1, 0, 0), dtype=torch.int32, device=device)


def typed_mask(batch: TensorBatch) -> Tensor:
    """The micro-batch's mask in the form that every one of our attention functions reads."""
    if batch.document_starts is not None:
        return batch.document_starts.view(1, 1, 1, -1)
    if batch.padding_mask is not None:
        return batch.padding_mask[:, None, None, :]
    return plain_mask(batch.labels.device)


def document_mask(starts: Tensor, rows: int, length: int) -> Tensor:
    """Pairs of the same document: bool (rows, 1, length, length) from the documents' starts in rows * length tokens."""
    tokens = torch.arange(rows * length, dtype=starts.dtype, device=starts.device)
    ids = torch.bucketize(tokens, starts.flatten()[1:], right=True).view(rows, 1, length)
    return ids[..., :, None] == ids[..., None, :]


def distance_mask(length: int, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """Pairs near enough: bool (length, length); None where every pair is. A window of W sees W - 1 positions back,
    and as many ahead unless causal."""
    if not causal and window is None:
        return None
    position = torch.arange(length, device=device)
    back = position[:, None] - position[None, :]
    allowed = back >= 0 if causal else None
    if window is not None:
        near = back < window if causal else back.abs() < window
        allowed = near if allowed is None else allowed & near
    return allowed


def dense_mask(mask: Tensor | None, query: Tensor, causal: bool, window: int | None) -> Tensor | None:
    """Any mask as bool (B or 1, 1, T or 1, K), or the float mask it was; None where every pair may attend."""
    if is_plain(mask):
        base = None
    elif is_packed(mask):
        base = document_mask(mask, query.shape[0], query.shape[2])  # type: ignore[arg-type]
    elif is_key_mask(mask, query):
        base = mask
    else:
        return mask
    near = distance_mask(query.shape[2], causal, window, query.device)
    if base is None or near is None:
        return base if near is None else near[None, None]
    return base & near


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as what is added to the scores: 0 where allowed, the format's lowest number elsewhere."""
    return torch.zeros((), dtype=dtype, device=allowed.device).where(allowed, torch.finfo(dtype).min)


def mask_function(
    *, q_length: int, kv_length: int, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False, local_size: int | None = None, device: Any = "cpu", **rest: Any,
) -> Tensor | None:  # fmt: skip
    """Mask maker that transformers calls for our attention functions, in loops that are not ours.

    Returns `causal_mask` where causality says it all and None where nothing needs saying, without looking at any
    value; otherwise bool (B, 1, Q, K). The arguments are those of `transformers.masking_utils.sdpa_mask`.
    """
    from transformers.masking_utils import sdpa_mask

    everything = attention_mask is None and (local_size is None or kv_length <= local_size)
    if everything and allow_is_bidirectional_skip:
        return None
    if everything and allow_is_causal_skip and q_length == kv_length:
        return causal_mask(torch.device(device))
    dense: Tensor | None = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        local_size=local_size,
        device=device,
        **rest,
    )
    return dense

"""The kernels under our SDPA function: scaled_dot_product_attention, and the ways to keep packed documents apart.

Shapes are as in `functions`: query (B, H, T, D), key and value (B, heads for keys, K, D).
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from tightfit.backends.pytorch.simulated_device import capability_of
from tightfit.backends.pytorch.techniques.attention.masks import distance_mask
from tightfit.devices import FLASH_MAJOR
from tightfit.errors import ModelError

HALF = (torch.float16, torch.bfloat16)
"""Number formats of 16 bits."""
GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether torch's variable-length kernel takes fewer heads of keys than of queries, as from torch 2.12 on."""

PackedWay = Literal["rows", "varlen", "slices", "dense"]


def repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with one head for each of the query's."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


def compute_dtype(query: Tensor) -> torch.dtype:
    """Autocast's format, or else the query's: kernels that autocast does not know must be given it."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float, scaling: float | None
) -> Tensor:
    """scaled_dot_product_attention: (B, H, T, D of value). Keys and values of grouped heads are repeated only where
    the kernel would otherwise be the unfused one. Raises ModelError where only flash may run and there is a mask."""
    grouped = query.shape[1] != key.shape[1]
    on_cuda = capability_of(query) is not None
    fused = mask is None and (not on_cuda or _flash_can_run(query))
    if mask is not None and on_cuda and not _takes_masks():
        raise ModelError("attention.kernel: 'flash' takes no mask, and this batch needs one (padding, or packed "
                         "documents with dropout in attention); write attention.kernel=auto")
    if grouped and not fused:
        key, value = repeat_heads(query, key, value)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling,
        enable_gqa=grouped and fused,
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _takes_masks() -> bool:
    """Whether a CUDA kernel other than flash may run."""
    allowed = torch.backends.cuda
    return any((allowed.mem_efficient_sdp_enabled(), allowed.cudnn_sdp_enabled(), allowed.math_sdp_enabled()))


def packed_way(query: Tensor, value: Tensor, starts: Tensor, dropout: float, position_bias: Tensor | None) -> PackedWay:
    """The way in which SDPA keeps packed documents apart. starts: as in `masks`.

    rows: nothing to do: no document crosses rows, and here each fills its own.
    varlen: the variable-length flash kernel, on CUDA in half precision without dropout.
    slices: each document by itself, on the CPU outside compiled regions. With dropout, or longer than a sliding window,
        each costs memory by the square of its length, which planning does not know: there it takes a run's fullest
        global batch, of one long document a row.
    dense: a T x T mask, the fallback for the rest. `apply.sdpa` notes it at the build where it can be known, and
        `functions.kernel_names` names it where it ran.
    """
    if starts.shape[-1] - 1 == query.shape[0]:
        return "rows"
    if position_bias is not None:
        return "dense"
    if capability_of(query) is None:
        if torch.compiler.is_compiling():
            return "dense"
        return "rows" if dropout and isinstance(starts, torch._subclasses.FakeTensor) else "slices"
    size = query.shape[-1]
    fits = size == value.shape[-1] and size <= 256 and size % 8 == 0
    return "varlen" if fits and dropout == 0.0 and _flash_can_run(query) else "dense"


def _flash_can_run(query: Tensor) -> bool:
    """Whether this CUDA device has the flash kernel for this format, and may run it."""
    capability = capability_of(query)
    has_flash = capability is not None and capability[0] >= FLASH_MAJOR  # Dynamo compares no tuples in torch 2.11
    return has_flash and compute_dtype(query) in HALF and _flash_is_allowed()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _flash_is_allowed() -> bool:
    enabled: bool = torch.backends.cuda.flash_sdp_enabled()
    return enabled


def varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, causal: bool, window: int | None, dropout: float,
    scaling: float | None,
) -> Tensor:
    """Documents apart through torch's variable-length kernel. Its longest document is given as a whole row: an upper
    bound that the device need not be asked for."""
    rows, heads, length, size = query.shape
    reach = -1 if window is None else window - 1
    grouped: dict[str, Any] = {"enable_gqa": heads != key.shape[1]} if GROUPS_HEADS else {}
    if not GROUPS_HEADS:
        key, value = repeat_heads(query, key, value)
    dtype = compute_dtype(query)
    q, k, v = (t.to(dtype).transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    output = varlen_attn(q, k, v, starts, starts, length, length, scale=scaling,
                         window_size=(reach, 0 if causal else reach), **grouped)
    assert isinstance(output, Tensor)
    return output.view(rows, length, heads, size)


def slices(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, causal: bool, window: int | None, dropout: float,
    scaling: float | None,
) -> Tensor:
    """Each document through SDPA by itself."""
    rows, heads, length, _ = query.shape
    lengths = document_lengths(starts, rows, length, window)
    documents = zip(*(t.transpose(1, 2).flatten(0, 1).split(lengths) for t in (query, key, value)), strict=True)
    outputs = []
    for document in documents:
        q, k, v = (t.transpose(0, 1)[None] for t in document)
        near = None if window is None or q.shape[2] <= window else distance_mask(q.shape[2], causal, window, q.device)
        outputs.append(sdpa(q, k, v, near, causal and near is None, dropout, scaling)[0].transpose(0, 1))
    return torch.cat(outputs).view(rows, length, heads, value.shape[-1])


def document_lengths(starts: Tensor, rows: int, length: int, window: int | None) -> list[int]:
    """Tokens of each document. Fake tensors hold no values: there the documents are taken as equally long, which
    changes no total; or, where one longer than a window has a mask of its own, as a long and a short one a row, whose
    totals are the largest."""
    if not isinstance(starts, torch._subclasses.FakeTensor):
        return starts.diff().tolist()
    if window is not None:
        return [length - 1, 1] * rows
    count = starts.shape[0] - 1
    return [rows * length // count + (i < rows * length % count) for i in range(count)]

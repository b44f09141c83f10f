"""Keyword arguments that say which positions may see each other."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.techniques.attention.functions import create_blocks, near_blocks
from tightfit.backends.pytorch.techniques.attention.masks import (
    additive_mask,
    causal_mask,
    distance_mask,
    document_mask,
    plain_mask,
    typed_mask,
)
from tightfit.errors import ModelError

Arguments = Callable[[TensorBatch], dict[str, Any]]
Style = Literal["functions", "patterns", "own"]
Way = Literal["typed", "blocks", "padding", "own", "flash"]

USES_FUNCTIONS = re.compile(r"ALL_ATTENTION_FUNCTIONS|\bFUNCTIONS\[")
READS_THE_MASK = re.compile(r"attention_mask\.(?:dtype|is_floating_point)")
"""Code of an attention module that computes with its mask, such as one that chooses keys by their scores."""
HIDDEN_PATTERNS = re.compile(r"\b(?:create_chunked_causal_mask|(?:or|and)_mask_function|block_sequence_ids)\b")
READS_FOUR_DIMENSIONS = re.compile(r"\bcreate_(?:causal|bidirectional)_mask\(")
COUNTS_THE_MASK = re.compile(r"cumsum\(attention_mask|attention_mask(?:\.\w+\(\))*\.cumsum")
TOKEN_MIXER = re.compile(r"Mamba|SSM|DeltaNet|Recurrent|Rwkv|Lightning|LinearAttention")
OWN_PATTERN = re.compile(r"Longformer|BlockSparse|(?:Mra|Nystromformer)\w*Attention")
"""Names of attention modules that choose pairs of tokens by their places in a row, and take no mask of pairs."""
TAKES_THE_MEAN = re.compile(r"attention_mask\.sum\(")
WINDOWS = re.compile(r"create_\w*sliding_window\w*_mask\(")
RELATIVE = re.compile(r"relative_attention_bias|rotary")
UNPACKED = "write data.packing=false"


def attention_style(model: nn.Module) -> Style:
    """The model's way of computing attention.

    functions: by the functions registered with transformers; every layer's pattern (causal, sliding window) reaches
        them, so that a typed mask says the rest.
    patterns: by those functions, but some layers' patterns exist only in the masks that transformers makes; or the
        model's own forward pass reads the ordinary mask of padding, for a mean over real tokens.
    own: by code of its own, which no registered function replaces, or with masks that it reads itself.
    """
    sources = {_source(type(m)) for m in model.modules() if "Attention" in type(m).__name__}
    replaceable = sources and all(USES_FUNCTIONS.search(source) for source in sources)
    if not replaceable or reads_the_mask(model) or not (getattr(model, "_supports_sdpa", True) or has_sinks(model)):
        return "own"
    config = getattr(model, "config", None)
    if getattr(config, "use_bidirectional_attention", None) is False:  # its only use of such patterns is switched off
        return "functions"
    classes = {type(m) for m in model.modules() if hasattr(m, "set_attn_implementation")}
    hidden = any(HIDDEN_PATTERNS.search(_source(c, whole_file=False)) for c in classes)
    means = getattr(config, "classifier_pooling", None) in ("mean", "late")
    reads = means and TAKES_THE_MEAN.search(_source(type(model), whole_file=False))
    return "patterns" if hidden or reads else "functions"


def reads_the_mask(model: nn.Module) -> bool:
    """Whether attention modules compute with their mask, which transformers leaves out of SDPA's where causality is
    all: only eager attention is given one in any case."""
    kinds = {type(m) for m in model.modules() if re.search("Attention|Indexer", type(m).__name__)}
    return any(READS_THE_MASK.search(_source(kind, whole_file=False)) for kind in kinds)


def has_sinks(model: nn.Module) -> bool:
    """Whether attention has learned sinks, which only eager attention serves."""
    return any(isinstance(getattr(m, "sinks", None), Tensor) for m in model.modules())


def needs_eager(model: nn.Module) -> str | None:
    """The part of the model's attention that only eager attention serves, in a few words."""
    if has_sinks(model):
        return "attention sinks"
    capped = any(getattr(m, "attn_logit_softcapping", None) is not None for m in model.modules())
    return "capped attention scores" if capped else None


def mask_arguments(model: nn.Module, way: Way, causal: bool) -> Arguments:
    """The masks of that way, and with them positions, no cache, and the refusals. A value of None means: leave this
    out.

    typed: one mask for every layer (see `masks`); of a decoder behind an encoder its causality alone, for padding
        follows its real tokens. blocks: the same as BlockMasks.
    padding: the ordinary (B, T) mask of padding, from which transformers makes each layer's own.
    own: that one, and for packed documents an additive (B, 1, T, T) one, for attention of the model's own.
    flash: that one, and for packed documents their starts, as transformers hands them to the flash-attn library.
    Raises ModelError, from the function it returns, for packed documents or padding that the model takes no mask for.
    """
    accepts = forward_parameters(model)
    makers: dict[Way, Arguments] = {
        "typed": _typed, "blocks": block_arguments(model, causal), "padding": _padding, "flash": _flash,
        "own": partial(_own, model, causal),
    }  # fmt: skip
    masks = makers[way]
    masked, decoder = "attention_mask" in accepts, way in ("typed", "blocks") and "decoder_attention_mask" in accepts
    positions, obstacle = position_arguments(model), packing_obstacle(model, way)
    fixed = {"use_cache": False} if _takes_use_cache(model) else {}
    reads_last = hasattr(model, "sequence_summary") and getattr(model.config, "summary_type", None) == "last"

    def complete(batch: TensorBatch) -> dict[str, Any]:
        if batch.mask == "packed" and obstacle:
            raise ModelError(f"data.packing: {type(model).__name__} {obstacle}; {UNPACKED}")
        if batch.mask == "padded" and not masked and not causal:
            raise ModelError(f"model: {type(model).__name__} takes no attention_mask, so that it would read padding; "
                             "give it sequences of one length")
        if batch.mask == "padded" and reads_last:
            raise ModelError(f"model: {type(model).__name__} reads a class at the end of a row, where shorter texts "
                             "have padding; write micro_batch_size=1")
        found = masks(batch) if masked or batch.mask == "packed" else {}
        if decoder:
            found["decoder_attention_mask"] = causal_mask(batch.labels.device)
        return {**fixed, **found, **positions(batch)}

    return complete


def _typed(batch: TensorBatch) -> dict[str, Any]:
    return {"attention_mask": typed_mask(batch)}


def _padding(batch: TensorBatch) -> dict[str, Any]:
    return {} if batch.padding_mask is None else {"attention_mask": batch.padding_mask.long()}


def _own(model: nn.Module, causal: bool, batch: TensorBatch) -> dict[str, Any]:
    if batch.document_starts is None:
        return _padding(batch)
    rows, length = batch.labels.shape
    allowed = document_mask(batch.document_starts, rows, length)
    near = distance_mask(length, causal, None, allowed.device)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return {"attention_mask": additive_mask(allowed if near is None else allowed & near, dtype)}


def _flash(batch: TensorBatch) -> dict[str, Any]:
    if batch.document_starts is None:
        return _padding(batch)
    starts, longest = batch.document_starts, batch.labels.shape[1]
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


def block_arguments(model: nn.Module, causal: bool) -> Arguments:
    """Arguments in which documents and padding are a BlockMask, made once a micro-batch; mere causality is one made
    once a length, unless layers have sliding windows and so masks of their own."""
    both = "decoder_input_ids" in forward_parameters(model)
    windows = getattr(getattr(model, "config", None), "sliding_window", None) is not None
    shared = causal and not both and not windows

    @lru_cache(maxsize=8)
    def causality(length: int, device: torch.device) -> Any:
        return near_blocks(length, True, None, device)

    def blocks(batch: TensorBatch) -> dict[str, Any]:
        ids = batch.document_ids if batch.mask == "packed" else batch.padding_mask
        if ids is None or (batch.mask == "padded" and causal):
            device = batch.labels.device
            return {"attention_mask": causality(batch.labels.shape[1], device) if shared else plain_mask(device)}
        if both:
            raise ModelError("attention: 'flex' cannot keep padding out of an encoder-decoder; write attention=sdpa")
        packed = batch.mask == "packed"

        def allowed(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = ids[row, q] == ids[row, k] if packed else ids[row, k]
            return seen & (q >= k) if causal else seen

        rows, length = ids.shape
        return {"attention_mask": create_blocks(allowed, rows, length, ids.device)}

    return blocks


def position_arguments(model: nn.Module) -> Callable[[TensorBatch], dict[str, Tensor | None]]:
    """The `position_ids` that override a micro-batch's: shifted where the model's first position is not 0, left out
    (None) where it takes none, given where it would count them from a mask.

    Raises ModelError, from the function it returns, for packed documents whose positions cannot restart.
    """
    accepts = "position_ids" in forward_parameters(model)
    relative = any(RELATIVE.search(name) for name, _ in model.named_modules())
    offset = _first_position(model)
    counted = accepts and any(COUNTS_THE_MASK.search(_source(type(m))) for m in model.modules() if is_hf(m))

    def positions(batch: TensorBatch) -> dict[str, Tensor | None]:
        given = batch.inputs.get("position_ids")
        if given is None:
            ids = batch.inputs.get("input_ids")
            if not counted or ids is None:
                return {}
            return {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None] + offset}
        if accepts:
            return {"position_ids": given + offset} if offset else {}
        if batch.mask == "packed" and not relative:
            raise ModelError(f"data.packing: {type(model).__name__} takes no position_ids, so that its positions "
                             f"cannot restart in each document; {UNPACKED}")
        return {"position_ids": None}

    return positions


def packing_obstacle(model: nn.Module, way: Way) -> str | None:
    """The reason why the model cannot keep packed documents apart, as the rest of a sentence about it."""
    for name, module in list(model.named_modules())[1:]:  # a whole model is named after what it is made of
        wide = isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
        if wide or TOKEN_MIXER.search(type(module).__name__) or getattr(module, "trigram_input", False):
            return f"mixes the tokens of a row outside attention, in {name}"
        if OWN_PATTERN.search(type(module).__name__):
            return f"chooses which tokens of a row attend by their places in it, in {name}"
    if way == "padding":  # chunks, for one, are counted from the row's start, not the document's
        return "has attention patterns that count from the start of a row"
    if way == "flash" and not passes_arguments_on(model):
        return "passes no arguments on to its attention, such as where documents start"
    if way == "own":
        sources = [_source(type(m)) for m in model.modules() if is_hf(m)]
        if not any(READS_FOUR_DIMENSIONS.search(source) for source in sources):
            return "computes attention itself and takes no mask that keeps packed documents apart"
        if any("alibi" in source for source in sources) and getattr(getattr(model, "config", None), "alibi", True):
            return "reads positions from its padding mask (ALiBi), which cannot keep packed documents apart"
        if any(WINDOWS.search(source) for source in sources):
            return "has sliding windows that a mask for packed documents would lift"
    return None


def is_causal_model(model: nn.Module) -> bool:
    """Whether the model's self-attention is causal; False for an encoder-decoder, which has both."""
    both = "decoder_input_ids" in forward_parameters(model)
    return not both and any(getattr(m, "is_causal", False) is True for m in model.modules())


def forward_parameters(model: nn.Module) -> frozenset[str]:
    """The names of the arguments that the model's forward pass declares."""
    return frozenset(inspect.signature(model.forward).parameters)


def _takes_use_cache(model: nn.Module) -> bool:
    """Whether the forward pass has a cache to switch off, itself or in the base model it passes its arguments to."""
    if "use_cache" in forward_parameters(model):
        return True
    base: nn.Module = getattr(model, "base_model", model)
    return base is not model and passes_arguments_on(model) and "use_cache" in forward_parameters(base)


def passes_arguments_on(model: nn.Module) -> bool:
    """Whether the forward pass takes arguments that it does not name."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def _first_position(model: nn.Module) -> int:
    """The number of the first position, for explicit `position_ids`: RoBERTa's family counts from past the padding
    index."""
    for module in model.modules():
        padding = getattr(getattr(module, "position_embeddings", None), "padding_idx", None)
        if padding is not None:
            return int(padding) + 1
    return 0


def is_hf(module: nn.Module) -> bool:
    return hasattr(module, "set_attn_implementation")


def _source(cls: Any, whole_file: bool = True) -> str:
    """The source of the file that defines a class, or of the class alone; empty where there is none to read."""
    return _read_source(cls, whole_file)


@lru_cache(maxsize=256)
def _read_source(cls: Any, whole_file: bool) -> str:
    """Kept, for reading a class parses its file, and a plan builds its model for every trace."""
    try:
        return inspect.getsource((inspect.getmodule(cls) if whole_file else None) or cls)
    except (OSError, TypeError):
        return ""

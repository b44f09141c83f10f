"""Parameters, floating-point operations and bytes of a model, from its configuration's numbers alone.

Never from a model: techniques change models, and what they replace would no longer be counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tightfit.errors import ModelError
from tightfit.shapes.families import body_of, guess
from tightfit.shapes.parts import Body, Stack, Weights, first, linear, plain

__all__ = ["Shape", "Stack", "kv_cache_bytes", "mfu", "shape_of", "training_flops"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a model, and what it multiplies.

    parameters: all of them, tied weights once.
    active_parameters: those that one token uses; fewer where it is sent to some of the experts.
    stacks: its layers; an encoder before the decoder that reads it.
    head_products: weights that the last hidden state is multiplied by, for each position or, where
        `head_per_sample`, once.
    notes: what is not exact, as sentences; empty for the families that are known.
    """

    architecture: str
    parameters: int
    active_parameters: int
    stacks: tuple[Stack, ...]
    head_products: int
    head_per_sample: bool = False
    notes: tuple[str, ...] = ()


def shape_of(config: Any, task: str, parameters: int | None = None) -> Shape:
    """The shape of the model that a configuration describes, with the head of a task.

    config: a transformers configuration, our own, or any object with the same attributes.
    parameters: their number where it is known otherwise; needed where the configuration does not state the model's
        width, depth, heads and vocabulary.
    Raises ModelError for a model that is neither of a known family, nor states these, nor comes with `parameters`.
    """
    kind = first(config, "model_type", default=type(config).__name__)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    notes = [] if text is config else [f"only the text part of {kind} is counted"]
    body = body_of(text)
    if body is None:
        body = guess(text)
        notes.append(f"{kind} is not a family that is known here: its parameters and FLOPs are an estimate")
    if body is None:
        if parameters is None:
            raise ModelError(f"model: the configuration of {kind} does not state hidden_size, num_hidden_layers, "
                             "num_attention_heads and vocab_size; give the number of its parameters")
        notes[-1] = f"{kind} states no sizes: every parameter counts as multiplied once by each token"
        whole = Stack(layers=1, products=parameters, width=0, cache_width=0)
        return Shape(architecture=kind, parameters=parameters, active_parameters=parameters, stacks=(whole,),
                     head_products=0, notes=tuple(notes))
    head, per_sample = _head(text, body, task, first(config, "num_labels", default=2))
    weights = body.weights + head
    shape = Shape(
        architecture=kind, parameters=weights.total, active_parameters=weights.active, stacks=body.stacks,
        head_products=head.products, head_per_sample=per_sample, notes=tuple(notes),
    )
    if parameters is None:
        return shape
    unused = weights.total - weights.active
    return replace(shape, parameters=parameters, active_parameters=parameters - unused)


def _head(config: Any, body: Body, task: str, labels: int) -> tuple[Weights, bool]:
    """The weights behind the last layer, and whether they are applied once a sample, not once a position."""
    if body.head == "image":
        return linear(body.features, labels, True), True
    if task == "sequence-classification":
        if body.head == "masked" or len(body.stacks) == 2:
            return linear(body.features, body.features, True) + linear(body.features, labels, True), True
        return linear(body.embedding, labels), False
    outputs = first(config, "num_outputs", "vocab_size")
    tied = first(config, "tie_word_embeddings", default=not hasattr(config, "num_outputs"))
    scores = linear(body.embedding, outputs)
    if tied:
        scores = Weights(products=scores.products)
    if body.head == "masked":
        scores += linear(body.features, body.embedding, True) + plain(2 * body.embedding)
    return scores + plain(0 if body.head == "lm" else outputs), False


def training_flops(shape: Shape, samples: int, seq_len: int, target_len: int | None = None,
                   skip_masked: bool = False) -> int:
    """Model FLOPs of one forward and one backward pass: the matrix products that the mathematics needs.

    The convention of PaLM (arXiv 2204.02311, appendix B): 6 for each weight that a token is multiplied by, which is
    6 N D without embeddings that are only looked up, and 12 for each pair of positions, layer and feature of the
    queries. The backward pass counts twice the forward pass; nothing recomputed counts, nor do norms, softmax or the
    optimizer. Of a mixture of experts only the experts used count.

    samples, seq_len: sequences, and positions of each; of images and sounds the configuration fixes the positions.
    target_len: positions of the decoder's sequences, where there is an encoder too; `seq_len` where not given.
    skip_masked: count only the pairs that a causal mask and a sliding window leave, about half, as kernels that skip
        the rest are measured by. PaLM's convention counts them all.
    """
    forward = unneeded = 0
    source = 0
    for index, stack in enumerate(shape.stacks):
        given = seq_len if index == 0 or target_len is None else target_len
        length = stack.positions or given
        forward += samples * 2 * (length * stack.products + source * stack.source_products)
        for window in stack.windows or (None,) * stack.layers:
            forward += samples * 4 * stack.width * _pairs(length, window, stack.causal and skip_masked)
        if stack.source_products:
            forward += samples * 4 * stack.width * stack.layers * length * source
        stem, places = stack.stem
        forward += samples * 2 * stem * places
        unneeded += samples * 2 * stem * places  # no gradient of the raw input
        forward += 2 * stack.layers * _relative(stack, samples, length)
        source = length
    forward += samples * 2 * shape.head_products * (1 if shape.head_per_sample else source)
    return 3 * forward - unneeded


def _pairs(length: int, window: int | None, skip_masked: bool) -> int:
    """Pairs of a query and a key in one sequence."""
    if not skip_masked:
        return length * length
    reach = min(length, window or length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def _relative(stack: Stack, samples: int, length: int) -> int:
    """Multiplications of one layer's scores against relative positions, which are projected once for all samples."""
    kinds, positions, clipped = stack.relative
    used = min(positions, 2 * length) if clipped else positions
    return kinds * used * stack.width * (samples * length + stack.width)


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilization: the share of the device's peak (operations a second) that model FLOPs done in that
    time make; 0 where the peak is not known."""
    return flops / seconds / peak if peak else 0.0


def kv_cache_bytes(shape: Shape, samples: int, length: int, source_len: int = 0, bytes_each: int = 2) -> int:
    """Keys and values kept while generating, once `length` positions are there.

    samples: sequences, times beams. source_len: positions of the encoder, whose keys and values every decoder layer
    keeps. bytes_each: of one number. A sliding window keeps no more than its own positions.
    """
    total = 0
    for stack in shape.stacks:
        for window in stack.windows or (None,) * stack.layers:
            kept = min(length, window or length) + (source_len if stack.source_products else 0)
            total += 2 * stack.cache_width * kept
    return samples * bytes_each * total

"""Generation's forward passes on fake tensors: the prefill, and two decoding passes that stand for all.

They are run as transformers' `generate` runs them: logits of the last position alone where the model can, in float32;
greedily or with beams, which put the cache in a new order after each pass.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate.fake_global_batches import fake_global_batch
from tightfit.trace import Category, Phase

CACHES = ("past_key_values", "cache_params")
"""Names of the cache that models take and return."""


def generate(build: Build, tracker: Tracker) -> None:
    """The passes that generate `inference.new_tokens` tokens after each prompt. Decoding is traced as it begins and as
    it ends: in between it grows evenly, and each stands for half of the passes."""
    recipe, model = build.recipe, build.model
    prompt, steps, beams = recipe.seq_len, recipe.inference.new_tokens - 1, recipe.inference.beams
    generation = _Generation(model, tracker, recipe.batch_size, beams)
    encoded: dict[str, Any] = {}
    with _passes(tracker, Phase.PREFILL, 1):
        if model.config.is_encoder_decoder:  # type: ignore[union-attr]
            encoded = {"encoder_outputs": BaseModelOutput(last_hidden_state=generation.encode(prompt))}
            prompt = 1
        generation.forward(encoded, prompt)
    if not steps:
        return
    if build.device.kind == "cuda":
        _gather_experts(model)
    whole = not _grows(generation.cache)  # every decoding pass does the same
    with _passes(tracker, Phase.DECODE, steps if whole else steps - steps // 2):
        generation.forward(encoded, 1)
    if steps < 2 or whole:
        return
    generation.lengthen(steps - 2)
    with _passes(tracker, Phase.DECODE, steps // 2):
        generation.forward(encoded, 1)


class _Generation:
    """A model, and the cache that it keeps from pass to pass."""

    def __init__(self, model: Any, tracker: Tracker, batch: int, beams: int) -> None:
        self.model, self.tracker, self.batch, self.beams = model, tracker, batch, beams
        self.cache: Any = None
        self._cached: dict[str, Any] = {}
        self._takes = inspect.signature(model.forward).parameters
        self._length = 0
        self._held: list[Tensor] = []

    def encode(self, length: int) -> Tensor:
        """The encoder's output of the prompts, for every beam: (rows, length, D)."""
        hidden: Tensor = self.model.get_encoder()(_ids(self.tracker, self.batch, length)).last_hidden_state
        if self.beams > 1:
            hidden = hidden.repeat_interleave(self.beams, dim=0)
        self.tracker.mark(hidden, Category.KV_CACHE, from_birth=True)
        return hidden

    def forward(self, encoded: dict[str, Any], length: int) -> None:
        """A pass over `length` new tokens of every row, up to the next ones."""
        rows = self.batch * self.beams
        given: dict[str, Any] = {"decoder_input_ids" if encoded else "input_ids": _ids(self.tracker, rows, length)}
        self._length += length
        if not encoded:
            mask = torch.ones(rows, self._length, dtype=torch.int64)
            given["attention_mask"] = mask
            if "position_ids" in self._takes:
                positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
                given["position_ids"] = positions[:, -length:].clone()
        if "logits_to_keep" in self._takes:
            given["logits_to_keep"] = 1
        output = self.model(**given, **encoded, **self._cached, use_cache=True)
        self._cached = {name: output[name] for name in CACHES if output.get(name) is not None}
        self.cache = next(iter(self._cached.values()), None)
        self._mark()
        logits = output.logits[:, -1].to(copy=True, dtype=torch.float32)
        del output
        self._held = [logits]  # as `generate` holds them until the next pass is done
        if self.beams == 1:
            logits.argmax(-1)
            return
        scores = logits.log_softmax(-1)
        summed = scores + torch.empty(rows, 1)
        self._held += [scores, summed, summed.clone()]  # the last with finished beams left out
        summed.view(self.batch, -1).topk(2 * self.beams)
        self.cache.reorder_cache(torch.empty(rows, dtype=torch.int64))
        self._mark()

    def lengthen(self, tokens: int) -> None:
        """Go on to where so many more tokens are kept."""
        with self.tracker.paused():
            _lengthen(self.cache, tokens)
        self._length += tokens
        self._mark()

    def _mark(self) -> None:
        for tensor in _cached_tensors(self.cache):
            self.tracker.mark(tensor, Category.KV_CACHE, from_birth=True)


@contextmanager
def _passes(tracker: Tracker, phase: Phase, times: int) -> Iterator[None]:
    """A pass that stands for so many."""
    gc.collect()
    tracker.phase = phase
    with tracker.span(phase.value, times=times):
        yield
    tracker.phase = Phase.SETUP


def _gather_experts(model: Any) -> None:
    """On a GPU, transformers decodes a mixture of experts by gathering the experts' weights for each token
    (`_optimize_model_for_decode`)."""
    kinds = model.get_experts_implementation()
    if "grouped_mm" in kinds.values():
        model.set_experts_implementation(
            {part: "batched_mm" if kind == "grouped_mm" else kind for part, kind in kinds.items()}
        )


def recompute(build: Build, tracker: Tracker) -> None:
    """Generation without a cache, as `generation.generate` does it for one prompt: every token from the last `seq_len`
    tokens, so that all passes are alike."""
    steps = build.recipe.inference.new_tokens - 1
    ids = _ids(tracker, build.recipe.batch_size, build.recipe.seq_len)
    with _passes(tracker, Phase.PREFILL, 1):
        ids = with_next_token(build, ids)
    if steps:
        with _passes(tracker, Phase.DECODE, steps):
            with_next_token(build, ids)


def with_next_token(build: Build, ids: Tensor) -> Tensor:
    """Token ids (B, T) with the likeliest next one behind each row: (B, T + 1)."""
    context = ids[:, -build.recipe.seq_len :]
    logits = build.logits(TensorBatch(inputs={"input_ids": context}, labels=context))[:, -1].float()
    return torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=-1)


def one_pass(build: Build, tracker: Tracker) -> None:
    """The forward pass over a batch of a model that generates nothing."""

    def placed(tensor: Tensor) -> None:
        tracker.mark(tensor, Category.OTHER, from_birth=True)

    global_batch = fake_global_batch(build, [build.recipe.batch_size], placed)
    batch = global_batch.micro_batches[0].to(build.torch_device)
    with _passes(tracker, Phase.PREFILL, 1):
        build.logits(batch)


def _ids(tracker: Tracker, rows: int, length: int) -> Tensor:
    """Tokens without values: (rows, length)."""
    ids = torch.empty((rows, length), dtype=torch.int64)
    tracker.mark(ids, Category.OTHER, from_birth=True)
    return ids


# The keys and values that transformers keeps while it generates.


def _cached_tensors(cache: Any) -> Iterator[Tensor]:
    """Everything that a cache keeps."""
    for part in _parts(cache):
        for layer in part.layers:
            yield from (value for value in vars(layer).values() if isinstance(value, Tensor))


def _grows(cache: Any) -> bool:
    """Whether a cache keeps keys and values, which grow with every token; a state space's memory does not."""
    return any(_keeps(layer) for part in _parts(cache)[:1] for layer in part.layers)


def _lengthen(cache: Any, tokens: int) -> None:
    """Put `tokens` more tokens of no values into a cache, the last one by itself, as generation puts it there: what a
    sliding window keeps lies in the memory of the last concatenation."""
    for part in _parts(cache)[:1]:  # the keys and values of an encoder's output stay what they are
        for number, layer in enumerate(part.layers):
            for count in (tokens - 1, 1) if _keeps(layer) else ():
                if tokens and count:
                    part.update(_like(layer.keys, count), _like(layer.values, count), number)


def _parts(cache: Any) -> list[Cache]:
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache] if isinstance(cache, Cache) else []


def _keeps(layer: Any) -> bool:
    return isinstance(getattr(layer, "keys", None), Tensor)


def _like(kept: Tensor, tokens: int) -> Tensor:
    """Keys or values of so many tokens: (B, heads, tokens, D)."""
    return torch.empty((*kept.shape[:2], tokens, kept.shape[3]), dtype=kept.dtype, device=kept.device)

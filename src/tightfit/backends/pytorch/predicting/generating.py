"""Generation on fake tensors, its passes told to a tracker: transformers' own `generate`, or what stands for it."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.predicting.fake_windows import fake_window
from tightfit.backends.pytorch.predicting.kv_cache import cached_tensors, grows, lengthen
from tightfit.backends.pytorch.tracing.tracker import Tracker
from tightfit.trace import Category, Phase

Passes = list[tuple[Phase, int]]
"""Forward passes in order: the phase of each, and how many passes it stands for; 0 for one that only leads up to the
next."""

CACHES = ("past_key_values", "cache_params")
"""What models call the cache that they return."""


def passes(steps: int, whole: bool) -> tuple[Passes, Passes]:
    """The passes that stand for a prefill and `steps` decoding passes: those from the prompt on, and those at the end.

    At the end, the pass before the last is run too, for the last one still holds what that one left.
    """
    if whole or steps <= 3:
        return [(Phase.PREFILL, 1), *[(Phase.DECODE, 1)] * steps], []
    half = steps // 2
    return [(Phase.PREFILL, 1), (Phase.DECODE, steps - half)], [(Phase.SETUP, 0), (Phase.DECODE, half)]


class Spans:
    """The spans of a tracker's trace, one after the other."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._open: AbstractContextManager[None] | None = None

    def enter(self, phase: Phase, times: int) -> None:
        """A pass that stands for so many begins, and the one before it ends."""
        self.close()
        gc.collect()
        self.tracker.phase = phase
        if times:
            self._open = self.tracker.span(phase.value, times=times)
            self._open.__enter__()

    def close(self) -> None:
        """The pass ends."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)
        self.tracker.phase = Phase.SETUP


class _Made(Exception):
    """All passes that were asked for are made."""


class Generation:
    """Runs of a model's `generate`. A run ends where the passes asked for are made: without values, no sequence ever
    finishes."""

    def __init__(self, build: Build, tracker: Tracker) -> None:
        self.build = build
        self.tracker = tracker
        self.spans = Spans(tracker)
        self._cache: Any = None
        self._cache_name = CACHES[0]
        self._encoded: tuple[tuple[int, ...], torch.dtype] | None = None
        self._left: Passes = []
        self._begun = False

    def run(self, whole: bool) -> None:
        """The prefill and the decoding passes, or those that stand for them."""
        recipe = self.build.recipe
        prompt, steps = recipe.seq_len, recipe.inference.new_tokens - 1
        first, last = passes(steps, whole)
        self._generate(first, {"inputs": _ids(self.build, self.tracker, prompt), "max_new_tokens": steps + 1})
        if last and not grows(self._cache):  # every decoding pass does the same
            self.tracker.spans[-1] = replace(self.tracker.spans[-1], times=steps)
        elif last:
            with self.tracker.paused():
                lengthen(self._cache, steps - 3)
            self._mark_cache()
            self._generate(last, {**self._continued(prompt, steps), self._cache_name: self._cache})

    def _continued(self, prompt: int, steps: int) -> dict[str, Any]:
        """What makes `generate` go on before the last pass but one."""
        if self._encoded is None:
            return {"inputs": _ids(self.build, self.tracker, prompt + steps - 1), "max_new_tokens": 2}
        shape, dtype = self._encoded
        hidden: Any = torch.empty((self.build.recipe.batch_size, *shape), dtype=dtype)
        return {
            "inputs": _ids(self.build, self.tracker, prompt),
            "encoder_outputs": BaseModelOutput(last_hidden_state=hidden),
            "max_new_tokens": steps + 1,  # as many as in full, for the buffers that beams write into
        }

    def _generate(self, wanted: Passes, arguments: Mapping[str, Any]) -> None:
        model: Any = self.build.model
        self._left = list(wanted)
        hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]
        if wanted[0][0] is Phase.PREFILL:  # what comes before the first pass, such as an encoder's, belongs to it
            self.spans.enter(*self._left.pop(0))
            self._begun = True
        try:
            model.generate(
                **arguments, num_beams=self.build.recipe.inference.beams, do_sample=False, use_cache=True
            )
        except _Made:
            pass
        finally:
            self.spans.close()
            for hook in hooks:
                hook.remove()

    def _before(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._mark_cache()  # which the pass before may have put in the order of the beams
        encoded = kwargs.get("encoder_outputs")
        if encoded is not None:
            self._encoded = tuple(encoded[0].shape[1:]), encoded[0].dtype
            self.tracker.mark(encoded[0], Category.KV_CACHE, from_birth=True)
        if self._begun:
            self._begun = False
            return
        if not self._left:
            raise _Made
        phase, times = self._left.pop(0)
        if phase is Phase.DECODE:
            self._decode_experts()
        self.spans.enter(phase, times)

    def _decode_experts(self) -> None:
        """On a GPU, transformers decodes a mixture of experts by gathering the experts' weights for each token
        (`_optimize_model_for_decode`); it asks the tensors where they are, and fake ones do not say."""
        model: Any = self.build.model
        if self.build.device.kind == "cuda":
            kinds = model.get_experts_implementation()
            if "grouped_mm" in kinds.values():
                model.set_experts_implementation(
                    {part: "batched_mm" if kind == "grouped_mm" else kind for part, kind in kinds.items()}
                )

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        for name in CACHES:
            if output.get(name) is not None:
                self._cache, self._cache_name = output[name], name
        self._mark_cache()

    def _mark_cache(self) -> None:
        for tensor in cached_tensors(self._cache):
            self.tracker.mark(tensor, Category.KV_CACHE, from_birth=True)


def recompute(build: Build, tracker: Tracker) -> None:
    """Generation without a cache, as `generation.generate` does it for one prompt: every token from the last `seq_len`
    tokens, so that all passes are alike."""
    spans, steps = Spans(tracker), build.recipe.inference.new_tokens - 1
    ids = _ids(build, tracker, build.recipe.seq_len)
    spans.enter(Phase.PREFILL, 1)
    ids = with_next_token(build, ids)
    if steps:
        spans.enter(Phase.DECODE, steps)
        ids = with_next_token(build, ids)
    spans.close()


def with_next_token(build: Build, ids: Tensor) -> Tensor:
    """Token ids (B, T) with the likeliest next one behind each row: (B, T + 1)."""
    context = ids[:, -build.recipe.seq_len :]
    logits = build.logits(TensorBatch(inputs={"input_ids": context}, labels=context))[:, -1].float()
    return torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=-1)


def one_pass(build: Build, tracker: Tracker) -> None:
    """The forward pass over a batch of a model that generates nothing."""

    def placed(tensor: Tensor) -> None:
        tracker.mark(tensor, Category.OTHER, from_birth=True)

    spans = Spans(tracker)
    window = fake_window(build.recipe, build.task, build.facts, [build.recipe.batch_size], placed)
    batch = window.micro_batches[0].to(build.torch_device)
    spans.enter(Phase.PREFILL, 1)
    build.logits(batch)
    spans.close()


def _ids(build: Build, tracker: Tracker, length: int) -> Tensor:
    """Tokens of every prompt: (B, length)."""
    ids = torch.empty((build.recipe.batch_size, length), dtype=torch.int64)
    tracker.mark(ids, Category.OTHER, from_birth=True)
    return ids

"""Reading inference on fake tensors: what generating from a batch of prompts would allocate and run.

The prompts at once (prefill), then a forward pass for each further token (decode), with a cache that grows by one token
and so holds a layer's old keys and its new ones side by side for a moment. Only the first and the last of the decoding
passes are traced. A model that keeps no cache computes its context again for every token, as `generation.generate`
does; one that generates nothing makes one forward pass.

Memory holds weights; the KV cache, which is all that is kept from one pass to the next (keys and values, their copies
in the order of the beams, an encoder's output); activations, which are what the model's modules make in a pass; and
what is temporary, autocast's copies of weights included, which live as long as generation runs. With `full_eval` the
weights themselves are 16 bits and autocast is off, as after `model.half()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tightfit.backends.pytorch.apply import APPLY
from tightfit.backends.pytorch.assembly import bare_build
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.models import cast_weights
from tightfit.backends.pytorch.simulate.data_dependent import answer
from tightfit.backends.pytorch.simulate.generating import generate, one_pass, recompute
from tightfit.backends.pytorch.simulate.predict import ON_HOST, fake_copy, skip_weight_init
from tightfit.backends.pytorch.simulate.target import fake_tensors, scratch_of
from tightfit.backends.pytorch.simulate.trace_failure import explain_trace_failure
from tightfit.backends.pytorch.simulate.untraced import untraced
from tightfit.backends.pytorch.techniques.attention.functions import EAGER, SDPA
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.recipe import Recipe
from tightfit.trace import Trace

PLAIN = {SDPA: "sdpa", EAGER: "eager"}
"""transformers' own attention functions by the names of those that stand for them in training."""


def predict_inference(recipe: Recipe, device: Device, model: nn.Module | None = None) -> Trace:
    """Trace of generating `inference.new_tokens` tokens after each of `batch_size` prompts of `seq_len` tokens.

    recipe: with precision and attention resolved; its optimizer, checkpointing and micro-batch are not read.
    model: a module of the caller's own, on any device; its weights are not read.

    The trace's spans are `prefill` and `decode`. No parameter is ever allocated. Raises Refused where a technique
    cannot serve, and where prompt and new tokens are more than the model has positions; ModelError, naming the module
    and the op, where a model cannot be traced.
    """
    recipe = recipe.model_copy(update={"pretrained": False})
    tracker = Tracker(scratch=scratch_of(device), answer=partial(answer, padded=False))
    with fake_tensors(device):
        own = None if model is None else fake_copy(model)
        with skip_weight_init():
            build = inference_build(recipe, device, ON_HOST, own)
        tracker.follow(build.model)
        try:
            with (tracker, build.process_settings(), torch.no_grad(), build.forward_context(),
                  explain_trace_failure(build, tracker)):
                run = generate if generates(build) else recompute if build.task.predicts == "next" else one_pass
                run(build, tracker)
                trace = tracker.trace("predicted")  # here, for what is freed from now on is no part of it
        finally:
            tracker.unfollow()
    trace.notes += build.notes
    trace.untraced += untraced(recipe, device, trace)
    return trace


def inference_build(
    recipe: Recipe, device: Device, torch_device: torch.device, model: nn.Module | None = None
) -> Build:
    """The model as it generates: weights in the precision's format, attention as transformers itself calls it.

    Its `forward_context` is to surround all of `generate`. Raises Refused.
    """
    trains_only = {"checkpointing": "auto", "optimizer": "auto", "compile": "auto"}
    apart = recipe.data.model_copy(update={"packing": False})
    recipe, asked = recipe.model_copy(update={**trains_only, "data": apart}), recipe
    reasons = [*recipe.refusals(device), *_refusals(asked)]
    if reasons:
        raise Refused("; ".join(reasons))
    build = bare_build(recipe, device, torch_device, model)
    for technique in (recipe.attention, recipe.precision):
        build = APPLY[type(technique)](technique, build)  # type: ignore[index]
    if build.evaluation_dtype is not None:
        cast_weights(build.model, build.evaluation_dtype)
        build = replace(build, forward_contexts=())
    build.model.eval()
    if generates(build):
        build.facts.check_length(build.recipe.seq_len, build.recipe.continued_tokens)
        for part in build.model.modules():
            if isinstance(part, PreTrainedModel):
                config: Any = part.config
                config._attn_implementation = PLAIN.get(config._attn_implementation, config._attn_implementation)
        return build
    return replace(build, notes=(*build.notes, *_without_cache(build)))


def generates(build: Build) -> bool:
    """Whether transformers generates with the model."""
    model = build.model
    return build.task.generates and isinstance(model, PreTrainedModel) and model.can_generate()


def _refusals(recipe: Recipe) -> Iterator[str]:
    attention = recipe.attention
    if attention == "auto" or recipe.precision == "auto":
        yield "attention, precision: auto is still to be resolved"
    elif not attention.generates:
        yield f"attention: inference with {attention.name} is not predicted yet; write attention=sdpa"
    if recipe.compiled:
        yield "compile: transformers generates uncompiled while its cache grows; write compile=off"


def _without_cache(build: Build) -> Iterator[str]:
    """Notes on a model that transformers does not generate with. Raises Refused."""
    name = type(build.model).__name__
    if build.recipe.inference.beams > 1:
        raise Refused(f"inference.beams: {name} has no generate that searches with beams; write inference.beams=1")
    if build.task.predicts == "next":
        yield f"inference: {name} keeps no cache, so that every token is computed from the whole context"
    else:
        yield f"inference: {name} generates nothing; this is one forward pass"

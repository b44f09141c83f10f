"""Checks of one real forward pass: which ops ran, and whether the outputs agree with the labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build
from tightfit.errors import ModelError


@contextmanager
def op_names() -> Iterator[Callable[[], tuple[str, ...]]]:
    """Listen to the forward pass that runs inside; what it yields returns the names of the ops that ran, each once,
    when that is over."""
    # A caller's own profiler would end with this one: then kernels go unnamed. Op names are all that is asked for:
    # without Kineto, whose first start takes seconds.
    profiler = None if _profiler_runs() else torch.autograd.profiler.profile(use_kineto=False)
    with ExitStack() as stack:
        if profiler is not None:
            with _no_kineto_log():
                stack.enter_context(profiler)
        yield lambda: _names(profiler)


def _names(profiler: torch.autograd.profiler.profile | None) -> tuple[str, ...]:
    """From the events as they were recorded: a table of them takes longer than the forward pass itself."""
    results = None if profiler is None else profiler.kineto_results
    return tuple(dict.fromkeys(event.name() for event in (results.events() if results else ())))


def check_outputs(build: Build, batch: TensorBatch, outputs: Tensor) -> None:
    """Compare a model's first outputs with the labels. Raises ModelError."""
    name = type(build.model).__name__
    classes, largest = build.loss.classes(build, outputs), int(batch.labels.max())
    if outputs.shape[:-1] != batch.labels.shape:
        raise ModelError(f"model: {name} gives logits of shape {(*outputs.shape[:-1], classes)}; labels of shape "
                         f"{tuple(batch.labels.shape)} need one row of logits each")
    if largest >= classes:
        raise ModelError(f"model: {name} gives {classes} logits, and the data has the label {largest}; write "
                         "vocab_size or num_labels to match the model")
    if not outputs.requires_grad:
        raise ModelError(f"model: the logits of {name} depend on no parameter that can be trained")


def _profiler_runs() -> bool:
    """Whether a profiler is at work in this process. Only a private function of torch says; without it, one may be."""
    autograd = getattr(torch._C, "_autograd", None)
    enabled = getattr(autograd, "_profiler_enabled", None)
    return True if enabled is None else bool(enabled())


@contextmanager
def _no_kineto_log() -> Iterator[None]:
    """Keep Kineto from writing to stderr, unless a level was asked for. It reads the level once, as it first starts."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        del os.environ[name]

"""Readings of a step: the ops of one forward pass, whether its outputs agree with the labels, seconds of compiling."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build
from tightfit.errors import ModelError

OUTERMOST = ("_compile.compile_inner", "backward._backward_impl")
"""Dynamo's timed sections that contain all others: of a forward pass's compilation, and of a backward pass's."""


@contextmanager
def op_names() -> Iterator[Callable[[], tuple[str, ...]]]:
    """Listen to the forward pass that runs inside; what it yields returns the names of the ops that ran, each once,
    when that is over."""
    # A caller's own profiler would end with this one: then kernels go unnamed. Op names are all that is asked for:
    # without Kineto, whose first start takes seconds.
    running = torch._C._autograd._profiler_enabled()
    profiler = None if running else torch.autograd.profiler.profile(use_kineto=False)
    with ExitStack() as stack:
        if profiler is not None:
            with _no_kineto_log():
                stack.enter_context(profiler)
        yield lambda: _names(profiler)


def _names(profiler: torch.autograd.profiler.profile | None) -> tuple[str, ...]:
    """From the events as they were recorded: a table of them takes longer than the forward pass itself."""
    results = None if profiler is None else profiler.kineto_results
    return tuple(dict.fromkeys(event.name() for event in (results.events() if results else ())))


def check_shapes(build: Build, batch: TensorBatch, outputs: Tensor) -> None:
    """Compare the shape of a model's outputs with that of the labels, whose values a plan does not have. Raises
    ModelError, also for outputs that nothing can be learned through."""
    name = type(build.model).__name__
    if outputs.dim() == 0:
        raise ModelError(f"model: {name} gives one number, such as a loss, where its logits should be; let its forward "
                         "return the logits, an object or a mapping with `logits`, or a tuple that begins with them")
    if outputs.shape[:-1] != batch.labels.shape:
        shape = (*outputs.shape[:-1], build.loss.classes(build, outputs))
        raise ModelError(f"model: {name} gives logits of shape {shape}; labels of shape "
                         f"{tuple(batch.labels.shape)} need one row of logits each")
    if not outputs.requires_grad:
        raise ModelError(f"model: the logits of {name} depend on no parameter that can be trained")


def check_outputs(build: Build, batch: TensorBatch, outputs: Tensor) -> None:
    """Compare a model's first outputs with the labels. Raises ModelError."""
    check_shapes(build, batch, outputs)
    name = type(build.model).__name__
    classes, largest = build.loss.classes(build, outputs), int(batch.labels.max())
    if largest >= classes:
        raise ModelError(f"model: {name} gives {classes} logits, and the data has the label {largest}; write "
                         "vocab_size or num_labels to match the model")


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


def compile_seconds() -> float:
    """Seconds that Dynamo and its backends have spent compiling in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:  # nothing was compiled, and loading Dynamo takes seconds
        return 0.0
    return sum(sum(dynamo.compilation_time_metrics.get(name, ())) for name in OUTERMOST)

"""A look at one real forward pass: which attention kernel ran, and in which formats activations are kept."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from tightfit.backends.base import Inspection
from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.attention.functions import kernel_names
from tightfit.errors import ModelError


class Inspector:
    """A context manager around one forward pass. It changes no result: it listens to the profiler and to what
    autograd saves."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._saved: dict[int, tuple[int, str]] = {}
        self._profiler: torch.autograd.profiler.profile | None = None
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._saved[storage.data_ptr()] = (storage.nbytes(), str(tensor.dtype).removeprefix("torch."))
        return tensor.detach()  # an output kept with its own history would be a cycle that only the collector frees

    def __enter__(self) -> Self:
        # A caller's own profiler would end with this one: then kernels go unnamed.
        if not _profiler_runs():
            # Op names are all that is asked for: without Kineto, whose first start takes seconds.
            self._profiler = torch.autograd.profiler.profile(use_kineto=False)
            with _no_kineto_log():
                self._profiler.__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        if self._profiler is not None:
            self._profiler.__exit__(kind, error, trace)

    def result(self) -> Inspection:
        """The inspection, after the forward pass."""
        saved: Counter[str] = Counter()
        for size, dtype in self._saved.values():
            saved[dtype] += size
        events = () if self._profiler is None else self._profiler.key_averages()
        kernels = kernel_names(event.key for event in events)
        return Inspection(attention_kernels=tuple(kernels), saved_bytes=dict(saved))


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

"""What techniques transform on the way to a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.backends.base import WindowSource
from tightfit.backends.pytorch.batch import TensorBatch, TensorWindow
from tightfit.backends.pytorch.losses import cross_entropy_sum
from tightfit.backends.pytorch.models import logits_of
from tightfit.devices import Device
from tightfit.models import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import Task

Context = Callable[[], AbstractContextManager[Any]]
MaskArguments = Callable[[TensorBatch], dict[str, Any]]
OptimizerFactory = Callable[[nn.Module], Optimizer]
CompileBackend = Callable[[str, str], Any]
Windows = Callable[[WindowSource, int, int], Iterator[TensorWindow]]
LossSum = Callable[[TensorBatch], Tensor]
Divisor = Callable[[TensorWindow], float]
Exchange = Callable[[bool], AbstractContextManager[Any]]


def no_mask(batch: TensorBatch) -> dict[str, Any]:
    """The arguments of a model that is told nothing about which positions may see each other."""
    return {}


def own_count(window: TensorWindow) -> float:
    """The window's labels that count: what its summed loss is divided by where no other process has a part of it."""
    return max(window.count, 1)


def no_exchange(last: bool) -> AbstractContextManager[None]:
    """What surrounds a micro-batch of a model that is alone."""
    return nullcontext()


@contextmanager
def _held(contexts: tuple[Context, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


@dataclass(frozen=True, kw_only=True)
class Build:
    """A model on its way to a step. Each technique takes one and returns one, changed with `dataclasses.replace`.

    model: the module itself, changed in place; parameter names stay what they are without any technique.
    stacks: the model's repeated blocks, one tuple for each stack (an encoder-decoder has two), in forward order.
    mask_arguments: the keyword arguments that tell the model which positions may see each other; a value of None
        leaves that argument out.
    forward_contexts: entered around every forward pass and its loss (autocast).
    settings: process settings held while steps run (tf32, the allowed SDPA kernels), entered once by `session`.
    loss_scaling: whether gradients are scaled up for fp16.
    optimizer_factory: makes the optimizer from the finished model.
    windows: prepares windows ahead of the step.
    compile_backend: what torch.compile is given as its backend in the place of one it names, in a mode: planning's own,
        which generates no code.
    evaluation_dtype: cast the weights to this for evaluation; None keeps them.
    shared_loss: a micro-batch's summed loss where copies of the model share its work; None where there is one model.
    divisor: what a micro-batch's summed loss is divided by, so that gradients are those of the whole window's mean.
    exchange: entered around a micro-batch's passes, and told whether it is the last of its window: where processes
        exchange gradients, they do so then.
    notes: sentences for the person running this, such as a risky combination.
    """

    recipe: Recipe
    device: Device
    torch_device: torch.device
    task: Task
    facts: ModelFacts
    model: nn.Module
    stacks: tuple[tuple[nn.Module, ...], ...]
    mask_arguments: MaskArguments = no_mask
    forward_contexts: tuple[Context, ...] = ()
    settings: tuple[Context, ...] = ()
    loss_scaling: bool = False
    optimizer_factory: OptimizerFactory | None = None
    windows: Windows | None = None
    compile_backend: CompileBackend | None = None
    evaluation_dtype: torch.dtype | None = None
    shared_loss: LossSum | None = None
    divisor: Divisor = own_count
    exchange: Exchange = no_exchange
    notes: tuple[str, ...] = ()

    def session(self) -> AbstractContextManager[None]:
        """Hold the process settings that the techniques asked for, and put back what was there."""
        return _held(self.settings)

    def forward_context(self) -> AbstractContextManager[None]:
        """Everything that surrounds a forward pass and its loss."""
        return _held(self.forward_contexts)

    def logits(self, batch: TensorBatch) -> Tensor:
        """The model's logits for a micro-batch on the device: (B, T, vocabulary) or (B, classes).

        Rows that only pad the vocabulary are cut off, so that they neither win nor weigh in the loss.
        """
        inputs = {name: self._as_weights(t) for name, t in batch.inputs.items()}
        arguments = {**inputs, **self.mask_arguments(batch)}
        logits = logits_of(self.model(**{name: value for name, value in arguments.items() if value is not None}))
        if self.recipe.pad_vocab_to and self.task.reads == "tokens" and logits.dim() == 3:
            return logits[..., : self.facts.vocab_size]
        return logits

    def loss_sum(self, batch: TensorBatch) -> Tensor:
        """A micro-batch's summed loss, a scalar."""
        if self.shared_loss is not None:
            return self.shared_loss(batch)
        with self.forward_context():
            return cross_entropy_sum(self.logits(batch), batch.labels)

    def _as_weights(self, values: Tensor) -> Tensor:
        """Inputs such as images in the format of the weights, if the model holds any: DataParallel's copies do not."""
        return values.to(next(self.model.parameters(), values).dtype) if values.is_floating_point() else values

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Hold the weights in the evaluation's format, and put the originals back, bit for bit.

        Each weight is replaced before the next one, and the originals wait in host memory while the device holds
        the smaller ones.
        """
        dtype = self.evaluation_dtype
        if dtype is None:
            yield
            return
        wide = [p for p in self.model.parameters() if p.dtype == torch.float32]
        originals = [t.data for t in wide]
        if self.torch_device.type != "cpu":
            originals = [t.cpu() for t in originals]
        for tensor in wide:
            tensor.data = tensor.data.to(dtype)
        try:
            yield
        finally:
            for tensor, original in zip(wide, originals, strict=True):
                tensor.data = original.to(self.torch_device)

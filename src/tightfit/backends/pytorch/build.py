"""A model on its way to a training step: what techniques change, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.backends.base import GlobalBatchSource
from tightfit.backends.pytorch.batch import TensorBatch, TensorGlobalBatch
from tightfit.backends.pytorch.models import logits_of
from tightfit.backends.pytorch.saved_model import save_model
from tightfit.backends.pytorch.techniques.loss.of_logits import LOSS_OF_LOGITS, Loss, Tally
from tightfit.backends.pytorch.world import ALONE, TensorWorld
from tightfit.devices import Device
from tightfit.errors import ModelError
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import Task
from tightfit.techniques.offload import HostShares

if TYPE_CHECKING:
    from tightfit.backends.pytorch.step import Step
    from tightfit.backends.pytorch.techniques.by_block.block_calls import BlockCalls
    from tightfit.backends.pytorch.weight_update import WeightUpdate

Context = Callable[[], AbstractContextManager[Any]]
MaskArguments = Callable[[TensorBatch], dict[str, Any]]
OptimizerFactory = Callable[[nn.Module], Optimizer]
CompileBackend = Callable[[str, str], Any]
GlobalBatches = Callable[[GlobalBatchSource, int, int, int | None], Iterator[TensorGlobalBatch]]
GradientSync = Callable[[bool], AbstractContextManager[Any]]


Check = Callable[["Build", TensorBatch, Tensor], None]
TrainingLoss = Callable[[TensorBatch, Check | None], Tensor]
Accumulation = Callable[["Build", "Step", TensorGlobalBatch], Tensor]
"""Runs every micro-batch's passes, in its order; returns the global batch's summed loss."""


SaveModel = Callable[["Build", Path, dict[int, str] | None], None]
"""Writes the trained model into a folder, with names for its classes. All processes call it."""


def save_whole(build: Build, folder: Path, classes: dict[int, str] | None) -> None:
    """The model as others read it."""
    save_model(build.model, folder, classes, first=build.world.rank == 0)


def no_mask(batch: TensorBatch) -> dict[str, Any]:
    """The arguments of a model that needs no word on which positions may see each other."""
    return {}


def nothing_gathered() -> None:
    """Drops nothing: a model on one device has its weights whole."""


def no_sync(last: bool) -> AbstractContextManager[None]:
    """The context of a micro-batch of one model alone."""
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
    mask_arguments: keyword arguments that say which positions may see each other; a value of None leaves one out.
    forward_contexts: entered around every forward pass and its loss (autocast).
    settings: process settings held while steps run (tf32, the allowed SDPA kernels), entered by who takes steps.
    loss: over the model's outputs and its head.
    loss_scaling: whether gradients are scaled up for fp16.
    optimizer_factory: makes the optimizer from the finished model.
    accumulation: the order of a global batch's passes.
    host_share: what of the blocks waits in host memory.
    calls_blocks: whether a step calls the model's blocks through `BlockCalls`.
    update_factory: makes the update of the weights, which owns the optimizer, given the calls of the blocks where the
        build wants them.
    global_batches: prepares global batches ahead of the step.
    compile_backend: what torch.compile gets in place of a backend by name, in a mode: planning's, without code.
    evaluation_dtype: cast the weights to this for evaluation; None keeps them.
    world: the processes that train this model together, and average their gradients.
    training_loss: a micro-batch's summed loss in training where the model is not called alone; None where it is.
    gradient_sync: entered around a micro-batch's passes; told whether it is the last, when processes average gradients.
    save_model: writes what was trained.
    drop_gathered: called after a forward pass that no backward pass follows: weights gathered from other processes go.
    own_model: whether the model is a module of the caller's own.
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
    loss: Loss = LOSS_OF_LOGITS
    loss_scaling: bool = False
    optimizer_factory: OptimizerFactory | None = None
    accumulation: Accumulation | None = None
    host_share: HostShares = field(default_factory=HostShares)
    calls_blocks: bool = False
    update_factory: Callable[[Build, BlockCalls | None], WeightUpdate] | None = None
    global_batches: GlobalBatches | None = None
    compile_backend: CompileBackend | None = None
    evaluation_dtype: torch.dtype | None = None
    world: TensorWorld = ALONE
    training_loss: TrainingLoss | None = None
    gradient_sync: GradientSync = no_sync
    save_model: SaveModel = save_whole
    drop_gathered: Callable[[], None] = nothing_gathered
    own_model: bool = False
    notes: tuple[str, ...] = ()

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The blocks of all stacks, each once."""
        return tuple(dict.fromkeys(block for stack in self.stacks for block in stack))

    def process_settings(self) -> AbstractContextManager[None]:
        """Hold the process settings that the techniques asked for, and put back what was there."""
        return _held(self.settings)

    def forward_context(self) -> AbstractContextManager[None]:
        """Everything that surrounds a forward pass and its loss."""
        return _held(self.forward_contexts)

    def optimizer(self) -> Optimizer:
        """A new optimizer over the finished model."""
        assert self.optimizer_factory is not None
        return self.optimizer_factory(self.model)

    def logits(self, batch: TensorBatch) -> Tensor:
        """The model's logits for a micro-batch on the device: (B, T, vocabulary) or (B, classes).

        Rows that only pad the vocabulary are cut off, so that they neither win nor weigh in the loss.
        """
        logits = logits_of(self.outputs(batch))
        if self.pads_vocabulary and logits.dim() == 3:
            return logits[..., : self.facts.vocab_size]
        return logits

    @property
    def pads_vocabulary(self) -> bool:
        """Whether the last rows of the head only pad the vocabulary."""
        return bool(self.recipe.pad_vocab_to) and self.task.reads == "tokens"

    def outputs(self, batch: TensorBatch) -> Any:
        """The model's own output for a micro-batch on the device."""
        inputs = {name: self._as_weights(t) for name, t in batch.inputs.items()}
        arguments = {**inputs, **self.mask_arguments(batch)}
        try:
            return self.model(**{name: value for name, value in arguments.items() if value is not None})
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise ModelError(f"model: {type(self.model).__name__} is called with {', '.join(batch.inputs)} by name, "
                             f"and refuses: {error}; rename its argument, or wrap the model") from None

    def loss_sum(self, batch: TensorBatch, check: Check | None = None, tally: Tally | None = None) -> Tensor:
        """A micro-batch's summed loss, a scalar; its labels are smoothed while the model is in training mode.

        check: sees the model's outputs before the loss is made of them. tally: counts what is predicted.
        """
        with self.forward_context():
            # Nothing else holds on to the outputs: whole logits are freed as soon as the loss has its own copy.
            smoothing = self.recipe.label_smoothing_factor if self.model.training else 0.0
            return self.loss.total(self._checked_outputs(batch, check), batch.labels, tally, smoothing)

    def _checked_outputs(self, batch: TensorBatch, check: Check | None) -> Tensor:
        outputs = self.loss.outputs(self, batch)
        if check is not None:
            check(self, batch, outputs)
        return outputs

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

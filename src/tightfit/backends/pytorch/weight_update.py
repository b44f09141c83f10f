"""The update of the weights: what a step calls when a global batch's gradients are there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tightfit.backends.pytorch.checkpoints import load_state, save_state
from tightfit.backends.pytorch.techniques.optimizer.state import set_learning_rate

if TYPE_CHECKING:
    from tightfit.backends.pytorch.build import Build


class WeightUpdate(ABC):
    """The update of the weights: it owns clipping, the scaler, stepping, dropping gradients, and the state of these.

    optimizer: the one it steps.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        self.new_optimizer()
        self._scaler = torch.amp.GradScaler(build.torch_device.type) if build.loss_scaling else None
        self._max_norm = build.recipe.max_grad_norm

    @abstractmethod
    def __call__(self) -> Tensor | None:
        """Learn from the gradients, and drop them. Returns their norm before clipping, if it was taken."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop the gradients of a step that failed."""

    @abstractmethod
    def make_states(self, *, late: bool = False) -> None:
        """Allocate optimizer states by a step that learns nothing. late: those alone of the second step, for which
        updates wait."""

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled for fp16: infinite gradients only skip a step then."""
        return self._scaler is not None

    def scale(self, loss: Tensor) -> Tensor:
        """The loss that the backward pass starts from."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, scaled."""
        self.scale(loss).backward()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use `learning_rate` for the gradients that are summed from now on."""
        set_learning_rate(self.optimizer, learning_rate)

    def step_calls(self) -> tuple[int, int]:
        """Calls of the optimizer's step that began, and that ended: an error leaves fewer."""
        return self._step_calls.begun, self._step_calls.ended

    def forget_scaling(self) -> None:
        """Reset what the scaler recorded in a step that failed; the scale stays."""
        if self._scaler is not None and self._scaler._scale is not None:
            self._scaler.update(self._scaler.get_scale())

    def flush(self) -> None:  # noqa: B027 - nothing is put off, by default
        """Finish what was put off: before anything else reads weights or optimizer states."""

    def close(self) -> None:  # noqa: B027 - as `flush`
        """Finish what was put off, and give the model back as an ordinary one. No step follows."""

    def new_optimizer(self) -> None:
        """Go on with a new optimizer, without states."""
        self.optimizer = self._build.optimizer()
        self._step_calls = _StepCalls(self.optimizer)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write a checkpoint's tensors into a folder; return the rest, as JSON values. All processes call this."""
        build = self._build
        meta = save_state(build.model, self.optimizer, folder, build.world, learned=build.recipe.trainable.freezes)
        return {**meta, "scaler": None if self._scaler is None else self._scaler.state_dict()}

    def load(self, folder: Path, meta: dict[str, Any]) -> None:
        """Go on from what `save` wrote, and returned. Raises CheckpointError."""
        build = self._build
        load_state(build.model, self.optimizer, folder, meta, self.make_states, build.world,
                   learned=build.recipe.trainable.freezes)
        if self._scaler is not None and meta["scaler"]:
            self._scaler.load_state_dict(meta["scaler"])


class _StepCalls:
    """Calls of an optimizer's step that began, and that ended. Not counted by the update itself, which a hook would
    keep alive."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.begun = self.ended = 0
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self.begun += 1

    def _end(self, *_: Any) -> None:
        self.ended += 1

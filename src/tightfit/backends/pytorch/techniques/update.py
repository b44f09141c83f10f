"""The update of the weights, once a global batch's gradients are there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.optimizer.apply import set_learning_rate
from tightfit.techniques.update import AfterBackward


def after_backward(technique: AfterBackward, build: Build) -> Build:
    return replace(build, update_factory=UpdateAfterBackward)


class UpdateAfterBackward:
    """Clip, step and drop at once. See `build.Update` for what each method promises."""

    def __init__(self, build: Build) -> None:
        assert build.optimizer_factory is not None
        self.optimizer = build.optimizer_factory(build.model)
        self._scaler = torch.amp.GradScaler(build.torch_device.type) if build.loss_scaling else None
        self._parameters = [p for p in build.model.parameters() if p.requires_grad]
        self._max_norm = build.recipe.max_grad_norm

    @property
    def scaled(self) -> bool:
        return self._scaler is not None

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)

    def __call__(self) -> Tensor | None:
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        norm = None
        if self._max_norm:
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        elif self._scaler is not None:  # a norm that is not finite is how a skipped step shows
            norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Any]:
        return {"scaler": None if self._scaler is None else self._scaler.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

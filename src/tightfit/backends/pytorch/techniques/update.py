"""The update of the weights: of all at once when a global batch's gradients are there, or block by block."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.sharding import full_tensor
from tightfit.backends.pytorch.techniques.optimizer.state import make_states
from tightfit.backends.pytorch.weight_update import WeightUpdate
from tightfit.techniques.update import AfterBackward, InBackward, WithForward

if TYPE_CHECKING:
    from tightfit.backends.pytorch.techniques.by_block.block_calls import BlockCalls


def after_backward(technique: AfterBackward, build: Build) -> Build:
    if build.calls_blocks:  # whose gradients or states may lie in host memory
        return by_block(technique, build)
    return replace(build, update_factory=UpdateAfterBackward)


def by_block(technique: AfterBackward | WithForward | InBackward, build: Build) -> Build:
    # Only whoever asks for it pays for what moves between device and host.
    from tightfit.backends.pytorch.techniques.by_block.update import UpdateByBlock

    return replace(build, update_factory=partial(UpdateByBlock, technique=technique), calls_blocks=True)


class UpdateAfterBackward(WeightUpdate):
    """Clip, step and drop at once."""

    def __init__(self, build: Build, calls: BlockCalls | None = None) -> None:
        super().__init__(build)
        self._parameters = [p for p in build.model.parameters() if p.requires_grad]

    def __call__(self) -> Tensor | None:
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        norm = None
        if self._max_norm:
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        elif self._scaler is not None:  # a norm that is not finite is how a skipped step shows
            norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        norm = None if norm is None else full_tensor(norm)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def abandon(self) -> None:
        self.forget_scaling()
        self.optimizer.zero_grad(set_to_none=True)

    def make_states(self, *, late: bool = False) -> None:
        make_states(self.optimizer, [] if late else self._parameters)

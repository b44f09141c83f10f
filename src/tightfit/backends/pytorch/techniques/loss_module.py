"""The loss of a build as a module, for what wraps one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build, Check


class LossModule(nn.Module):
    """A micro-batch's summed loss, (1,), made where the micro-batch is: logits would have to travel."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.model = build.model
        self._build = build

    def forward(self, check: Check | None = None, **fields: Any) -> Tensor:
        """fields: of a TensorBatch. check: as of `Build.loss_sum`."""
        build = replace(self._build, model=self.model)  # DataParallel calls copies of this module
        return build.loss_sum(TensorBatch(**fields), check)[None]

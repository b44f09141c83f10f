"""The update that DeepSpeed's engine makes: it clips, steps and drops, each process its own part."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.zero import checkpoints
from tightfit.backends.pytorch.weight_update import WeightUpdate


class ZeroUpdate(WeightUpdate):
    """An engine's own update."""

    def __init__(self, build: Build, engine_of: Callable[[Optimizer], Any], drive: Path | None = None) -> None:
        """drive: the folder of what waits on a drive, which goes with this."""
        super().__init__(build)
        self._drive = drive
        self.engine = engine_of(self.optimizer)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def __call__(self) -> Tensor | None:
        self.engine.step()
        norm = self.engine.get_global_grad_norm() if self._max_norm else None
        return None if norm is None else torch.as_tensor(norm, dtype=torch.float32, device=self._build.torch_device)

    def abandon(self) -> None:
        self.engine.optimizer.zero_grad()

    def make_states(self, *, late: bool = False) -> None:
        if not late:
            checkpoints.make_flat_states(self.engine, self.optimizer)

    def close(self) -> None:
        self.engine.destroy()
        if self._drive is not None:
            shutil.rmtree(self._drive, ignore_errors=True)

    def save(self, folder: Path) -> dict[str, Any]:
        return checkpoints.save(self._build, self.engine, self.optimizer, folder)

    def load(self, folder: Path, meta: dict[str, Any]) -> None:
        checkpoints.load(self._build, self.engine, self.optimizer, folder, meta)

"""A global batch as tensors: from numpy, to pinned memory, to the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tightfit.tasks import BatchOf, BatchTotals, GlobalBatch, MicroBatch


@dataclass(frozen=True, kw_only=True)
class TensorBatch(BatchOf[Tensor]):
    """A micro-batch on a device.

    document_starts: int32 (documents + 1,), where each document begins in the flattened (B * T) tokens, ending with
        B * T; only with mask `packed`. This is the form that variable-length kernels read.
    """

    document_starts: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> TensorBatch:
        """The same batch with `change` applied to every tensor."""
        changed: dict[str, Any] = tree_map_only(Tensor, change, vars(self))
        return TensorBatch(**changed)

    def pin_memory(self) -> TensorBatch:
        return self.map(lambda t: t.pin_memory())

    def to(self, device: torch.device) -> TensorBatch:
        """Copied to `device`, without waiting where the memory is pinned."""
        if device.type == "cpu":
            return self
        return self.map(lambda t: t.to(device, non_blocking=True))


@dataclass(frozen=True, kw_only=True)
class TensorGlobalBatch(BatchTotals):
    """A global batch whose micro-batches are tensors in host memory."""

    micro_batches: tuple[TensorBatch, ...]

    def pin_memory(self) -> TensorGlobalBatch:
        return replace(self, micro_batches=tuple(m.pin_memory() for m in self.micro_batches))


def document_starts(document_ids: np.ndarray) -> np.ndarray:
    """Starts of documents in the flattened rows: int32 (documents + 1,) for `document_ids` (B, T)."""
    fresh = np.ones(document_ids.shape, dtype=bool)
    fresh[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return np.append(np.flatnonzero(fresh), document_ids.size).astype(np.int32)


def tensor_batch(micro_batch: MicroBatch) -> TensorBatch:
    """The micro-batch as tensors that share the arrays' memory."""
    ids, padding = micro_batch.document_ids, micro_batch.padding
    # Causal models get no mask for padding, which is right only where it follows a row's real tokens.
    assert padding is None or (padding[:, 1:] <= padding[:, :-1]).all(), "padding must follow the real tokens"
    return TensorBatch(
        inputs={name: torch.from_numpy(value) for name, value in micro_batch.inputs.items()},
        labels=torch.from_numpy(micro_batch.labels),
        mask=micro_batch.mask,
        padding=None if padding is None else torch.from_numpy(padding),
        document_ids=None if ids is None else torch.from_numpy(ids),
        document_starts=None if ids is None else torch.from_numpy(document_starts(ids)),
    )


def tensor_global_batch(global_batch: GlobalBatch) -> TensorGlobalBatch:
    """The global batch as tensors that share the arrays' memory."""
    return TensorGlobalBatch(micro_batches=tuple(map(tensor_batch, global_batch.micro_batches)), **global_batch.totals)

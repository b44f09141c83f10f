"""Each task's loss, from the logits: a sum over the labels that count."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tightfit.tasks import IGNORE


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy, in fp32 or the logits' own format where that is wider.

    logits: (..., classes). labels: int64 (...), `IGNORE` where nothing counts. Returns a scalar.
    """
    logits = logits.flatten(0, -2)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")

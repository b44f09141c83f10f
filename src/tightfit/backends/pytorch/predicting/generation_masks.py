"""The masks that transformers makes while it generates, on fake tensors as on real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor


@contextmanager
def masks_as_generated() -> Iterator[None]:
    """transformers looks into a padding mask to see whether it says anything, which it cannot do with a fake one: it
    then builds every mask in full. Inside this, a fake one is taken to hold no padding, and the masks that transformers
    leaves out for a real one without padding are left out. Real tensors are treated as ever.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    plain = MASKS["sdpa"]

    def unpadded(*args: Any, **kwargs: Any) -> Tensor | None:
        fake = isinstance(kwargs.get("attention_mask"), FakeTensor)
        if fake and is_left_out(**kwargs):
            return None
        mask: Tensor | None = plain(*args, **kwargs)
        return mask

    MASKS["sdpa"] = unpadded
    try:
        yield
    finally:
        del MASKS["sdpa"]


def is_left_out(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **rest: Any,
) -> bool:
    """Whether transformers leaves a mask without padding out: one query sees all, and causality is the kernel's own.

    The arguments are those of `transformers.masking_utils.sdpa_mask`. Read from transformers 5.17.
    """
    if local_size is not None and kv_length >= local_size:
        return False
    starts = isinstance(q_offset, int) and q_offset == 0
    return allow_is_bidirectional_skip or (allow_is_causal_skip and (q_length in (1, kv_length) or starts))

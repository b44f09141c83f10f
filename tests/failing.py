"""Calls that fail when they are told to."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from copy import copy
from typing import Any


def failing(
    error: BaseException, call: Callable[..., Any] = lambda *_: None, *, at: int = 0, times: int = sys.maxsize
) -> Callable[..., Any]:
    """The call, which fails from the given time on, so often."""
    calls = itertools.count(-at)

    def called(*arguments: Any, **named: Any) -> Any:
        if 0 <= next(calls) < times:
            raise copy(error)  # whose traceback keeps nothing alive
        return call(*arguments, **named)

    return called


def no_room(*call: Callable[..., Any], **when: int) -> Callable[..., Any]:
    """The same, as CUDA says that memory ran out."""
    import torch

    return failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 bytes"), *call, **when)

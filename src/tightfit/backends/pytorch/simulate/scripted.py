"""Functions of a model that TorchScript runs, such as DeBERTa's, as the Python that they were made from: TorchScript's
interpreter takes no fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SCRIPTED: Any = torch.jit.ScriptFunction
"""Type of what `torch.jit.script` and `torch.jit.trace` make of a function."""


@contextmanager
def scripts_as_python() -> Iterator[None]:
    """Context in which a call of a scripted function runs the Python function that it was made from, wherever a module
    holds it. One that keeps none, as one read from a file, runs as ever."""
    scripted = vars(SCRIPTED)["__call__"]  # as it lies in the class: what getattr gives would bind to no function

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        # Where torch keeps it for its compiler, which takes no scripts either.
        python = getattr(function, "_torchdynamo_inline", None)
        if python is None:
            return scripted.__get__(function)(*args, **kwargs)
        return python(*args, **kwargs)

    SCRIPTED.__call__ = call
    try:
        yield
    finally:
        SCRIPTED.__call__ = scripted

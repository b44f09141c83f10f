"""Ops whose results are the same from run to run, as PyTorch promises of them: `deterministic: true`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tightfit.backends.pytorch.replaced import replaced

WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""cuBLAS's variable, which it reads once, and a value with which its sums have one order."""


def use_deterministic_matmuls() -> None:
    """Let cuBLAS sum in one order; before the process's first matrix product."""
    os.environ.setdefault(*WORKSPACES)


@contextmanager
def deterministic_ops() -> Iterator[None]:
    """Context in which an op runs in its deterministic form, and one that has none raises."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with replaced(torch.utils.deterministic, "fill_uninitialized_memory", False):  # none reads what nobody wrote
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])

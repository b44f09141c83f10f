"""The frameworks that run a step. Each is loaded only when a recipe names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tightfit.backends.base import Backend


def load_backend(name: str) -> Backend:
    """The backend of that name, its framework imported now."""
    assert name == "pytorch", name
    from tightfit.backends.pytorch.backend import PytorchBackend

    return PytorchBackend()

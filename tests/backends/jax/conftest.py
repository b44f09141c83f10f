"""Fixtures of the JAX backend's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def fast_compilation(fast_xla: None) -> None:
    """Every test here compiles quickly."""

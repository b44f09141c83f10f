"""What the tests of every backend share."""

from __future__ import annotations

import pytest

from tightfit.backends import load_backend
from tightfit.backends.base import Backend

BACKENDS = ("pytorch", "jax")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn."""
    if request.param == "jax":
        request.getfixturevalue("fast_xla")
    return load_backend(request.param)

from __future__ import annotations

import pytest

from tightfit.backends.pytorch.techniques.by_block import activations


@pytest.fixture(autouse=True)
def every_tensor_is_worth_a_copy(monkeypatch):
    """Tiny models keep nothing that would leave a card otherwise."""
    monkeypatch.setattr(activations, "SMALLEST_COPY", 0)

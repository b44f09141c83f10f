"""Mixtures of experts: their active parameters, the function that computes them, and the losses of their routers.

A model without experts imports only this module.
"""

from __future__ import annotations

from torch import nn


def has_experts(model: nn.Module) -> bool:
    """Whether any of the model's modules is a mixture of experts."""
    return any(hasattr(module, "num_experts") for module in model.modules())

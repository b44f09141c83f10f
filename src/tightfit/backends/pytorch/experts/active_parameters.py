"""A model's mixtures of experts, and the share of their weights that a token is multiplied by."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tightfit.backends.pytorch.sharding import full_shape
from tightfit.errors import ModelError
from tightfit.model_facts import experts_per_token


def experts_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold experts' weights: each weight has a first dimension of that many experts, or is one of a
    list of that many modules."""
    for module in model.modules():
        count = getattr(module, "num_experts", None)
        if not isinstance(count, int):
            continue
        listed = isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) == count
        if listed or any(p.dim() == 3 and p.shape[0] == count for p in module.parameters(recurse=False)):
            yield module


def active_share(model: nn.Module, experts: nn.Module) -> float:
    """The share of the experts that a token is sent to: what the experts' own configuration says, or the model's."""
    config = getattr(experts, "config", None) or getattr(model, "config", None)
    chosen, count = experts_per_token(config), experts.num_experts
    if count == 0:
        raise ModelError("model: its configuration has layers of 0 experts; write 1 or more there")
    return min(chosen / count, 1.0) if chosen and isinstance(count, int) else 1.0


def inactive_parameters(model: nn.Module) -> int:
    """The parameters of experts that a token is not sent to."""
    idle = 0.0
    for experts in experts_of(model):
        idle += (1 - active_share(model, experts)) * sum(full_shape(p).numel() for p in experts.parameters())
    return round(idle)

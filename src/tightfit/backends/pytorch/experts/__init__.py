"""Mixtures of experts: their active parameters, the function that computes them, and the losses of their routers.

A model without experts imports only this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from tightfit.backends.pytorch.batch import TensorBatch, TensorGlobalBatch
from tightfit.backends.pytorch.models import parameter_count

if TYPE_CHECKING:
    from tightfit.backends.pytorch.build import Build
    from tightfit.backends.pytorch.pending_step import Metrics


def has_experts(model: nn.Module) -> bool:
    """Whether any of the model's modules is a mixture of experts."""
    return any(hasattr(module, "num_experts") for module in model.modules())


def parameters_met(model: nn.Module) -> int:
    """Parameters of the model that a token meets: of experts, the share that it is sent to."""
    count = parameter_count(model)
    if not has_experts(model):
        return count
    # Only whoever has experts pays for it.
    from tightfit.backends.pytorch.experts.active_parameters import inactive_parameters

    return count - inactive_parameters(model)


def may_route(build: Build) -> bool:
    """Whether a build's model has experts, or its recipe takes it that it has."""
    asked = build.recipe.router_aux_loss_coef or build.recipe.router_z_loss_coef
    return bool(asked) or has_experts(build.model)


class Routing:
    """The routing of a model's steps: here of one without routers, which takes part in nothing.

    `begin` a global batch, then `enter` each micro-batch before its forward pass, and where others came between;
    `report` is for the step's end.
    """

    def begin(self, global_batch: TensorGlobalBatch, scale: Callable[[Tensor], Tensor]) -> None:
        """A global batch's passes follow. scale: of the loss, for fp16."""

    def enter(self, number: int, batch: TensorBatch | None = None) -> None:
        """The micro-batch of that number runs now. batch: itself, where it begins."""

    def record(self, recording: bool) -> None:
        """Say whether a forward pass runs, and no recomputation."""

    def function_names(self, ops: Iterable[str]) -> tuple[str, ...]:
        """Names of the functions that computed the experts in a forward pass that ran these ops."""
        return ()

    def report(self) -> tuple[tuple[Tensor, ...], Metrics | None]:
        """Figures of the whole global batch, and their reading, which may come when the next one has begun."""
        return (), None

    def close(self) -> None:
        """Let the model be as it was."""

"""The update of the weights: when a global batch's gradients are clipped, applied and dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Self

from tightfit.techniques.precision import half_precision
from tightfit.techniques.technique import Technique, refuse_between_blocks, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe


class Update(Technique):
    slot: ClassVar[str] = "update"
    auto_on: ClassVar = ()
    needs_by_block: ClassVar[bool] = False
    """Whether micro-batches have to go through the blocks together."""
    in_backward: ClassVar[bool] = False
    """Whether a block is updated as soon as its gradient is final."""
    deferred: ClassVar[bool] = False
    """Whether a block is updated when the next forward pass comes to it."""


@technique
class AfterBackward(Update):
    """Clip, step the optimizer and drop the gradients as soon as the last backward pass is done."""

    name: ClassVar[str] = "after-backward"
    speed: ClassVar[str] = "the baseline"
    memory: ClassVar[str] = "the baseline: every gradient is there at once, and the optimizer's temporaries beside them"


@technique
class WithForward(Update):
    """Update each block when the next forward pass comes to it. Everything an update needs is known by then: clipping,
    loss scaling and schedules are exact (forward-fusion: Jiang et al. 2021, arXiv 2104.00237)."""

    name: ClassVar[str] = "with-forward"
    speed: ClassVar[str] = "as after-backward; with offload, states come and go while blocks compute"
    memory: ClassVar[str] = "the optimizer's temporaries of one block; gradients go block by block"
    deferred: ClassVar[bool] = True

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        return refuse_between_blocks(recipe, "update=with-forward", "update=after-backward")

    @classmethod
    def default_setting(cls, recipe: Recipe, device: Device) -> Self | None:
        return cls() if recipe.offloaded.optimizer else None


@technique
class InBackward(Update):
    """Update each block as soon as its gradient is final, and drop the gradient: there is one block's at a time. No
    norm of all gradients is known then, so that nothing can be clipped by it."""

    name: ClassVar[str] = "in-backward"
    speed: ClassVar[str] = "as after-backward"
    memory: ClassVar[str] = "one block's gradients instead of all"
    needs_by_block: ClassVar[bool] = True
    in_backward: ClassVar[bool] = True

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from refuse_between_blocks(recipe, "update=in-backward", "update=after-backward")
        if recipe.max_grad_norm:
            yield ("update=in-backward cannot clip by the norm of all gradients, which is not known in the "
                   "backward pass; write max_grad_norm=0, or update=with-forward")
        if recipe.precision != "auto" and recipe.precision.loss_scaling:
            unscaled = "fp32" if half_precision(device).loss_scaling else "bf16"
            yield ("update=in-backward cannot skip a step whose scaled gradients overflow; write "
                   f"precision={unscaled}, or update=with-forward")
        if recipe.accumulation != "auto" and not recipe.accumulation.by_block:
            yield ("update=in-backward needs final gradients block by block; write accumulation=by-block, or "
                   "update=after-backward")

"""Data parallelism: several devices that share a global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tightfit.techniques.base import Exactness, Technique, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe


class Parallel(Technique):
    slot: ClassVar[str] = "parallel"
    may_be_auto: ClassVar[bool] = False
    every_device: ClassVar[bool] = False
    """Whether one process uses all of this machine's devices."""
    copies_model: ClassVar[bool] = False
    """Whether copies of the model run at once in one process."""


@technique
class NoParallel(Parallel):
    """One device."""

    name: ClassVar[str] = "none"
    speed: ClassVar[str] = "the baseline"
    memory: ClassVar[str] = "the baseline"


@technique
class _DataParallel(Parallel):
    exact: ClassVar[Exactness] = "rounding"

    def refuse(self, recipe: Recipe, device: Device) -> list[str]:
        if recipe.backend.runs_torch:
            return ["on several devices PyTorch serves a ladder's rungs so far: training has neither data nor "
                    "checkpoints by rank; write parallel=none, or parallel=dp with backend=jax"]
        return []


@technique
class Dp(_DataParallel):
    """One process: each micro-batch's rows are shared among all of this machine's devices. PyTorch's DataParallel
    copies the model to each of them at every step; JAX compiles one program for all."""

    name: ClassVar[str] = "dp"
    speed: ClassVar[str] = "up to the number of devices; less where the model is copied anew"
    memory: ClassVar[str] = "activations of a device's share; weights, gradients and states on every device"
    every_device: ClassVar[bool] = True
    copies_model: ClassVar[bool] = True


@technique
class Ddp(_DataParallel):
    """A process for each device, each with its share of every global batch; gradients are averaged while the backward
    pass runs (DistributedDataParallel: Li et al. 2020, arXiv 2006.15704)."""

    name: ClassVar[str] = "ddp"
    speed: ClassVar[str] = "nearly the number of devices, where the link between them is fast"
    memory: ClassVar[str] = "as one device, and buckets as large as the gradients"

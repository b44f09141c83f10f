"""Parallel training: several devices that share a global batch, and perhaps the model's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from tightfit.techniques.base import NUMBER, Exactness, Positive, Technique, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe

Seconds = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False), NUMBER]


class Parallel(Technique):
    slot: ClassVar[str] = "parallel"
    may_be_auto: ClassVar[bool] = False
    every_device: ClassVar[bool] = False
    """Whether one process uses all of this machine's devices."""
    copies_model: ClassVar[bool] = False
    """Whether copies of the model run at once in one process."""
    shards: ClassVar[bool] = False
    """Whether each process holds a part of every weight."""

    @property
    def process_count(self) -> int:
        """How many processes train a resolved recipe."""
        return 1


@technique
class NoParallel(Parallel):
    """One device."""

    name: ClassVar[str] = "none"
    speed: ClassVar[str] = "the baseline"
    memory: ClassVar[str] = "the baseline"


@technique
class Dp(Parallel):
    """One process: each micro-batch's rows are shared among all of this machine's devices. PyTorch's DataParallel
    copies the model to each of them at every step; JAX compiles one program for all."""

    name: ClassVar[str] = "dp"
    exact: ClassVar[Exactness] = "rounding"
    speed: ClassVar[str] = "up to the number of devices; less where the model is copied anew"
    memory: ClassVar[str] = "activations of a device's share; weights, gradients and states on every device"
    every_device: ClassVar[bool] = True
    copies_model: ClassVar[bool] = True

    def refuse(self, recipe: Recipe, device: Device) -> list[str]:
        if recipe.backend.runs_torch:
            return ["PyTorch's DataParallel copies the model at every step, and serves a ladder's rungs alone; write "
                    "parallel=ddp, or parallel=dp with backend=jax"]
        return []


@technique
class ManyProcesses(Parallel):
    """A process for each device."""

    exact: ClassVar[Exactness] = "rounding"

    processes: Positive | Literal["auto"] = "auto"
    """Number of processes, each with a device: auto takes this machine's GPUs, or as many as a launcher started."""
    timeout: Seconds = 1800
    """Seconds that a process waits for the others before the run ends."""

    @property
    def process_count(self) -> int:
        return 1 if self.processes == "auto" else self.processes

    def of_one_process(self, recipe: Recipe) -> Recipe:
        """The recipe of the step that the fullest process takes, as if it were alone."""
        share = -(-recipe.batch_size // self.process_count)
        micro = recipe.micro_batch_size
        return recipe.override(parallel="none", batch_size=share,
                               micro_batch_size=micro if micro == "auto" else min(micro, share))

    def refuse(self, recipe: Recipe, device: Device) -> list[str]:
        reasons = []
        if recipe.profile_step is not None:
            reasons.append("a profile is of one process; write profile_step=null, or "
                           "parallel=none")
        return reasons


@technique
class Ddp(ManyProcesses):
    """A process for each device, each with its share of every global batch; gradients are averaged while the last
    micro-batch's backward pass runs (DistributedDataParallel: Li et al. 2020, arXiv 2006.15704)."""

    name: ClassVar[str] = "ddp"
    speed: ClassVar[str] = "nearly the number of devices, where the link between them is fast"
    memory: ClassVar[str] = "activations of a device's share; weights, gradients and states on every device"

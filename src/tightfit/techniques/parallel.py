"""Parallel training: several devices that share a global batch, and perhaps the model's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

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
        return recipe.override(parallel=self if self.shards else "none", batch_size=share,
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
    memory: ClassVar[str] = "as one device; with several micro-batches, buckets as large as the gradients besides"


@technique
class Fsdp(ManyProcesses):
    """A process for each device, each with a part of every weight, gradient and optimizer state. A block's weights are
    gathered while it computes, the next one's meanwhile, and its gradients summed where their part is kept (FSDP: Zhao
    et al. 2023, arXiv 2304.11277, as torch's fully_shard)."""

    name: ClassVar[str] = "fsdp"
    speed: ClassVar[str] = "as ddp where the link hides half as many bytes again; slower where it does not"
    memory: ClassVar[str] = "weights, gradients and states divided by the number of devices; two blocks gathered"
    shards: ClassVar[bool] = True

    reshard: bool = True
    """Drop a block's gathered weights after its forward pass, and gather them again for the backward pass."""
    gradient_sync: Literal["every", "last"] = "every"
    """The micro-batches after which gradients are summed over processes: after the last alone costs less exchange, and
    keeps whole gradients until then."""
    cpu_offload: bool = False
    """Keep each process's part of weights, gradients and optimizer states in the host's memory, and update them there.
    """

    @classmethod
    def representative_settings(cls) -> list[Self]:
        return [cls(), cls(cpu_offload=True)]

    def refuse(self, recipe: Recipe, device: Device) -> list[str]:
        reasons = super().refuse(recipe, device)
        optimizer, precision, compiled = recipe.optimizer, recipe.precision, recipe.compile
        checkpointing = recipe.checkpointing
        if optimizer != "auto" and not optimizer.updates_parts:
            reasons.append(f"optimizer={optimizer.name} needs more of a weight than one process's part; write "
                           "optimizer=adamw, or parallel=ddp")
        if precision != "auto" and precision.computes_in != precision.activations_in:
            reasons.append(f"precision={precision.name} scales weights by what it sees of them, which would be a part; "
                           "write precision=bf16, or parallel=ddp")
        if compiled != "auto" and compiled.one_region:
            reasons.append(f"weights are gathered between blocks, of which compile={compiled.name} makes one region; "
                           "write compile=per-block, or parallel=ddp")
        if checkpointing != "auto" and checkpointing.spans_blocks:
            reasons.append(f"checkpointing={checkpointing.name} recomputes several blocks as one, whose weights are "
                           "gathered one by one; write checkpointing=every-block, or parallel=ddp")
        return reasons

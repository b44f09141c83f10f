"""Parallel training: several devices that share a global batch, and perhaps the model's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from tightfit.techniques.technique import NUMBER, Exactness, Positive, Technique, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe

Seconds = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False), NUMBER]

ZERO_FORMATS = ("float32", "bfloat16")
"""Number formats that DeepSpeed's engine computes in here, over fp32 weights."""
FP32 = 4
"""Bytes of an element in fp32: of a weight, of its gradient, and of the copy of it that DeepSpeed updates."""
BUCKET_BYTES = 25 << 20
"""Bytes of gradients that are summed at once: DistributedDataParallel's default, but for its first bucket."""


class Parallel(Technique):
    slot: ClassVar[str] = "parallel"
    changes_states: ClassVar[bool] = True
    may_be_auto: ClassVar[bool] = False
    one_device: ClassVar[bool] = False
    """Whether a step is one device's work."""
    every_device: ClassVar[bool] = False
    """Whether one process uses all of this machine's devices."""
    engine_steps: ClassVar[bool] = False
    """Whether another library's engine steps the optimizer."""
    reach: ClassVar[int] = 1
    """Groups of blocks on either side that a group's work refers to."""

    @property
    def shards(self) -> bool:
        """Whether each process holds a part of every weight."""
        return False

    @property
    def cpu_offloads(self) -> bool:
        """Whether parts of weights, gradients and optimizer states wait in the host's memory."""
        return False

    @property
    def nvme_path(self) -> str | None:
        """The folder on a drive where parts wait; None where none do."""
        return None

    @property
    def syncs_every(self) -> bool:
        """Whether processes sum gradients after every micro-batch, and not after the last one of a step alone."""
        return False

    @property
    def process_count(self) -> int:
        """Number of processes that train a resolved recipe."""
        return 1

    def communicating_less(self, several: bool) -> list[Self]:
        """Settings that exchange less, and hold more. several: whether each process has several micro-batches."""
        return []

    def of_one_process(self, recipe: Recipe) -> Recipe:
        """The recipe of the step that the fullest process takes, as if it were alone."""
        return recipe

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        return []


@technique
class NoParallel(Parallel):
    """One device."""

    name: ClassVar[str] = "none"
    one_device: ClassVar[bool] = True
    speed: ClassVar[str] = "the baseline"
    memory: ClassVar[str] = "the baseline"

    def left_open(self, device: Device) -> bool:
        return device.world > 1


def undivided_bytes(recipe: Recipe) -> float:
    """Bytes of weights, gradients and optimizer states for each parameter of a model that is not divided."""
    return sum(technique.bytes_per_parameter(recipe) for technique in (recipe.precision, recipe.optimizer)
               if technique != "auto")  # fmt: skip


@technique
class Dp(Parallel):
    """One process: each micro-batch's rows are shared among all of this machine's devices. PyTorch's DataParallel
    copies the model to each of them at every step; JAX compiles one program for all."""

    name: ClassVar[str] = "dp"
    exact: ClassVar[Exactness] = "rounding"
    speed: ClassVar[str] = "up to the number of devices; less where the model is copied anew"
    memory: ClassVar[str] = "activations of a device's share; weights, gradients and states on every device"
    every_device: ClassVar[bool] = True


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

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        return [cls(processes=device.world)] if device.world > 1 and recipe.backend.name in cls.auto_on else []

    def of_one_process(self, recipe: Recipe) -> Recipe:
        share = -(-recipe.batch_size // self.process_count)
        micro = recipe.micro_batch_size
        return recipe.override(parallel=self if self.shards else "none", batch_size=share,
                               micro_batch_size=micro if micro == "auto" else min(micro, share))

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if recipe.profile_step is not None:
            yield "a profile is of one process; write profile_step=null, or parallel=none"


@technique
class Ddp(ManyProcesses):
    """A process for each device, each with its share of every global batch; gradients are averaged while the last
    micro-batch's backward pass runs (DistributedDataParallel: Li et al. 2020, arXiv 2006.15704)."""

    name: ClassVar[str] = "ddp"
    speed: ClassVar[str] = "nearly the number of devices, where the link between them is fast"
    memory: ClassVar[str] = "as one device; with several micro-batches, buckets as large as the gradients besides"

    @classmethod
    def default_setting(cls, recipe: Recipe, device: Device) -> Self | None:
        return cls(processes=device.world) if device.world > 1 else None

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from super().refuse(recipe, device)
        if recipe.weight_rounding == "stochastic":
            yield ("each process would round its copy of the weights by random numbers of its own, and the "
                   "copies would drift apart; write optimizer=adamw precision.rounding=kahan")


@technique
class _Divided(ManyProcesses):
    reach: ClassVar[int] = 2
    whole_weights: ClassVar[str] = "parallel=ddp"
    """The setting whose processes each have whole weights."""

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from super().refuse(recipe, device)
        optimizer, checkpointing = recipe.optimizer, recipe.checkpointing
        if optimizer != "auto" and not optimizer.works_on_shards:
            yield (f"optimizer={optimizer.name} needs more of a weight than one process's part; write "
                   "optimizer=adamw, or parallel=ddp")
        if recipe.mode == "train" and recipe.precision != "auto" and recipe.precision.full_eval:
            yield ("weights whose update is divided cannot be replaced for an evaluation; write "
                   "precision.full_eval=false, or parallel=ddp")
        if checkpointing != "auto" and checkpointing.spans_blocks and self.shards:
            yield (f"checkpointing={checkpointing.name} recomputes several blocks as one, whose weights are "
                   f"gathered one by one; write checkpointing=every-block, or {self.whole_weights}")


@technique
class Fsdp(_Divided):
    """A process for each device, each with a part of every weight, gradient and optimizer state. A block's weights are
    gathered while it computes, the next one's meanwhile, and its gradients summed where their part is kept (FSDP: Zhao
    et al. 2023, arXiv 2304.11277, as torch's fully_shard)."""

    name: ClassVar[str] = "fsdp"
    speed: ClassVar[str] = "as ddp where the link hides half as many bytes again; slower where it does not"
    memory: ClassVar[str] = "weights, gradients and states divided by the number of devices; two blocks gathered"
    slowdown_share: ClassVar[Mapping[str, float]] = {"cuda": 0.05}
    worth_trying: ClassVar = ({}, {"cpu_offload": True})

    reshard: bool = True
    """Drop a block's gathered weights after its forward pass, and gather them again for the backward pass."""
    gradient_sync: Literal["every", "last"] = "every"
    """The micro-batches after which gradients are summed over processes: after the last alone costs less exchange, and
    keeps whole gradients until then."""
    cpu_offload: bool = False
    """Keep each process's part of weights, gradients and optimizer states in host memory, and update them there."""

    @property
    def shards(self) -> bool:
        return True

    @property
    def syncs_every(self) -> bool:
        return self.gradient_sync == "every"

    @property
    def cpu_offloads(self) -> bool:
        return self.cpu_offload

    def communicating_less(self, several: bool) -> list[Self]:
        knobs: list[Mapping[str, Any]] = [{"reshard": False}]
        if several:
            knobs += [{"gradient_sync": "last"}, {"reshard": False, "gradient_sync": "last"}]
        return [replace(self, **changes) for changes in knobs]

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        plain = super().search_settings(recipe, device)
        return [*plain, *(replace(setting, cpu_offload=True) for setting in plain)]

    def slowdown(self, device: Device) -> float:
        return 0.5 if self.cpu_offload else super().slowdown(device)

    def bytes_per_parameter(self, recipe: Recipe) -> float:
        return -undivided_bytes(recipe) * (1.0 if self.cpu_offload else 1 - 1 / self.process_count)

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from super().refuse(recipe, device)
        precision, compiled = recipe.precision, recipe.compile
        if precision != "auto" and precision.scales_weights:
            yield (f"precision={precision.name} scales weights by what it sees of them, which would be a part; "
                   "write precision=bf16, or parallel=ddp")
        if compiled != "auto" and compiled.one_region:
            yield (f"weights are gathered between blocks, of which compile={compiled.name} makes one region; "
                   "write compile=per-block, or parallel=ddp")


@technique
class Zero(_Divided):
    """A process for each device, each with a part of the optimizer states, of the gradients from stage 2 on, and of the
    weights in stage 3 (ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054), by DeepSpeed; what is offloaded waits in the
    host's memory, or on a drive (arXiv 2104.07857)."""

    name: ClassVar[str] = "zero"
    engine_steps: ClassVar[bool] = True
    speed: ClassVar[str] = "about as ddp in stages 1 and 2, as fsdp in stage 3; the processor updates what is offloaded"
    memory: ClassVar[str] = "optimizer states, gradients, weights, by stage, divided by the number of devices"
    whole_weights: ClassVar[str] = "parallel.stage=2"
    auto_on: ClassVar = ()  # a plan divides with fsdp, which it traces
    worth_trying: ClassVar = ({"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 2, "offload": "cpu"},
                              {"stage": 3, "offload": "cpu"})

    stage: Literal[1, 2, 3] = 2
    """Stage, by what is divided: 1 optimizer states, 2 gradients as well, 3 weights as well."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where optimizer states are kept, and in stage 3 weights: cpu is host memory; nvme a drive, in stage 3 alone."""
    nvme_path: str | None = None
    """A folder on the drive, for offload=nvme."""

    @property
    def shards(self) -> bool:
        return self.stage == 3

    @property
    def syncs_every(self) -> bool:
        return self.stage > 1

    @property
    def cpu_offloads(self) -> bool:
        return self.offload != "none"

    def bytes_per_parameter(self, recipe: Recipe) -> float:
        held, whole = undivided_bytes(recipe), FP32 * (3 - self.stage)
        parts = 0.0 if self.cpu_offloads else (held + FP32 - whole) / self.process_count
        return whole + parts - held

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from super().refuse(recipe, device)
        precision, compiled = recipe.precision, recipe.compile
        if precision != "auto" and (precision.weight_bytes != 4 or precision.computes_in not in ZERO_FORMATS):
            yield (f"precision={precision.name} is not one of those that it is held to; write precision=bf16, "
                   "precision=fp32, or parallel=fsdp")
        if recipe.trainable.freezes:
            yield (f"trainable={recipe.trainable.name} leaves few gradients and states to divide; write "
                   "trainable=all, or parallel=ddp")
        if compiled != "auto" and compiled.compiles:
            yield (f"DeepSpeed's hooks are no part of what compile={compiled.name} compiles; write "
                   "compile=off, or parallel=fsdp")
        if self.offload == "nvme" and self.stage < 3:
            yield (f"offload=nvme is stage 3's, and stage is {self.stage}; write parallel.stage=3, or "
                   "parallel.offload=cpu")
        if (self.offload == "nvme") != (self.nvme_path is not None):
            yield ("offload=nvme and nvme_path go together; write both, such as parallel.offload=nvme "
                   "parallel.nvme_path=/mnt/nvme, or neither")

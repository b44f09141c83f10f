"""DeepSpeed's engine around the loss of one build, made by `deepspeed.initialize` and driven by micro-batches.

It divides by the number of processes, and by nothing else: a micro-batch's loss comes over the global batch's count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build, Check
from tightfit.backends.pytorch.models import parameter_count
from tightfit.backends.pytorch.techniques.zero.library import load_deepspeed, quiet, require_async_io
from tightfit.backends.pytorch.techniques.zero.update import ZeroUpdate
from tightfit.backends.pytorch.world import TensorWorld
from tightfit.errors import Refused
from tightfit.techniques.parallel import BUCKET_BYTES, FP32, Zero

if TYPE_CHECKING:
    from tightfit.backends.pytorch.techniques.by_block.block_calls import BlockCalls

BUCKET = BUCKET_BYTES // FP32
"""Elements that are summed, or gathered, at once, in fp32. DeepSpeed's own default takes 2 GB."""
DRIVE_NOTE = ("parallel.offload: DeepSpeed compiles its async_io for the drive before the first step, once on each "
              "machine, in a few minutes; the processor's update is torch's, for which nothing is compiled")


def wrap(technique: Zero, build: Build, loss_module: nn.Module) -> Build:
    """The build with its model, gradients and optimizer in the hands of an engine. loss_module: the build's loss.
    Raises MissingLibrary, Refused."""
    deepspeed = load_deepspeed(build.torch_device.type)
    notes, drive = build.notes, None
    if technique.nvme_path is not None:
        require_async_io()
        notes, drive = (*notes, DRIVE_NOTE), folder_on_drive(build.world, Path(technique.nvme_path))
    config = configuration(technique, build, drive)
    updates: list[ZeroUpdate] = []  # the step's, which is made once the notes are said: an engine may compile

    def loss(batch: TensorBatch, check: Check | None) -> Tensor:
        whole: Tensor = updates[-1].engine(check, **vars(batch)).sum()
        return whole

    @contextmanager
    def sync(last: bool) -> Iterator[None]:
        engine = updates[-1].engine
        engine.set_gradient_accumulation_boundary(last)
        yield
        if not last:
            engine.step()  # counts, and learns nothing yet

    def engine_of(client: Optimizer) -> Any:
        with quiet():
            if drive is not None:  # left to itself it writes fp32 weights in 16 bits on a processor
                deepspeed.zero.Init(module=loss_module, config_dict_or_path=config, remote_device="nvme",
                                    pin_memory=build.device.kind == "cuda")
            return deepspeed.initialize(model=loss_module, optimizer=client, config=config)[0]

    def update(build: Build, calls: BlockCalls | None) -> ZeroUpdate:
        updates.append(ZeroUpdate(build, engine_of, drive))
        return updates[-1]

    return replace(build, training_loss=loss, gradient_sync=sync, update_factory=update, notes=notes,
                   settings=(*build.settings, quiet))


def folder_on_drive(world: TensorWorld, parent: Path) -> Path:
    """A new folder for this run's parts, of one name in all processes: DeepSpeed's files have the same names in every
    run. Raises Refused where there can be none."""

    def made() -> str:
        try:
            return tempfile.mkdtemp(prefix="tightfit-", dir=parent)
        except OSError as error:
            raise Refused(f"parallel.nvme_path: {parent} is no folder to write to ({error.strerror}); write one on the "
                          "drive that is to hold weights and states") from None

    return Path(world.broadcast_from_rank0(made))


def configuration(technique: Zero, build: Build, drive: Path | None) -> dict[str, Any]:
    """DeepSpeed's configuration. drive: the folder on a drive for what waits there."""
    pinned = build.device.kind == "cuda"
    zero: dict[str, Any] = {
        "stage": technique.stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET,
    }  # fmt: skip
    if technique.stage == 3:
        # Two blocks are there at a time, one that computes and the next one, and what lies outside of the blocks.
        block, outside = _sizes(build)
        zero |= {"stage3_prefetch_bucket_size": block, "stage3_max_live_parameters": 2 * block + outside,
                 "stage3_max_reuse_distance": 0}
    if technique.offload != "none":
        where: dict[str, Any] = {"device": technique.offload, "pin_memory": pinned}
        if drive is not None:
            where["nvme_path"] = str(drive)
        zero["offload_optimizer"] = where
        if technique.stage == 3:
            zero["offload_param"] = where
    return {
        # The sizes are for its own reports; accumulation ends where the step says.
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
        "gradient_clipping": float(build.recipe.max_grad_norm or 0),
        "zero_optimization": zero,
        # The optimizer is torch's, and nothing is compiled for it.
        "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
    }  # fmt: skip


def _sizes(build: Build) -> tuple[int, int]:
    """The parameters of the largest block, and of what lies outside of the blocks."""
    blocks = [sum(p.numel() for p in block.parameters()) for block in build.blocks]
    return max(blocks, default=0), parameter_count(build.model) - sum(blocks)

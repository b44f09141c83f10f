"""The order of a global batch's forward and backward passes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from tightfit.backends.pytorch.batch import TensorGlobalBatch
from tightfit.backends.pytorch.build import Build
from tightfit.techniques import accumulation as declared

if TYPE_CHECKING:
    from tightfit.backends.pytorch.step import Step


def loop(technique: declared.Loop, build: Build) -> Build:
    return replace(build, accumulation=one_after_the_other)


def by_block(technique: declared.ByBlock, build: Build) -> Build:
    # Only whoever asks for it pays for coroutines.
    from tightfit.backends.pytorch.techniques.by_block.sweep import ByBlock

    accumulation = ByBlock(technique.sweep_of, technique.gradient_sums == "fp32")
    return replace(build, accumulation=accumulation, calls_blocks=True)


def one_after_the_other(build: Build, step: Step, global_batch: TensorGlobalBatch) -> Tensor:
    """Each micro-batch forward and backward, before the next one."""
    total: Tensor | None = None
    for number in range(len(global_batch.micro_batches)):
        with build.gradient_sync(number == len(global_batch.micro_batches) - 1):
            loss = step.forward(global_batch, number)
            total = loss if total is None else total + loss
            del loss
            step.backward(global_batch, number)
    assert total is not None
    return total

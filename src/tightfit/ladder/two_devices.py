"""Rungs on two devices: the share of each, and what has to be there."""

from __future__ import annotations

from tightfit.backends.measurements import Timings
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.measure.parallel_timing import cards, time_distributed, time_in_one_process
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.ladder.peers import shares_rows
from tightfit.ladder.rungs import DEVICES, Launch, launch_refusals
from tightfit.recipe import Recipe
from tightfit.techniques.loss import Plain
from tightfit.training.session import training_global_batches


def run_parallel(launch: Launch, recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
    """A rung on two devices. Raises Refused where what it needs is missing, and OutOfMemory.

    launch: `dp` for two GPUs in one process, each micro-batch of twice the recipe's cut in two; else this process's
    half of every global batch, and what the fuller process needed, on a GPU each where there are two, on the processor
    otherwise.
    """
    found = cards(device)
    if reasons := launch_refusals(launch, found):
        raise Refused("; ".join(reasons))
    if launch == "dp":
        if recipe.compiled:
            raise Refused("compile: DataParallel copies the model anew at every step; write compile=off")
        if not isinstance(recipe.loss, Plain):
            raise Refused("loss: DataParallel runs copies of the head at once; write loss=plain")
        micro = recipe.resolved_micro_batch
        both = recipe.override(parallel="dp", micro_batch_size=min(DEVICES * micro, recipe.batch_size))
        if reasons := both.refusals(device):
            raise Refused("; ".join(reasons))
        if shares_rows(recipe):
            raise Refused("data.packing: DataParallel cannot cut rows that documents share; write data.packing=false")
        one = both.override(parallel="none")
        return time_in_one_process(one, device, training_global_batches(both), warm_up, steps)
    if found < DEVICES:
        device = PytorchBackend().device(recipe.override(device="cpu"))
    return time_distributed(recipe.override(parallel="ddp"), device, training_global_batches(recipe), warm_up, steps)

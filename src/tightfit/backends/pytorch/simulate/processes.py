"""Predicted trace of a recipe's training: of one process, and of one among several with what they exchange."""

from __future__ import annotations

from torch import nn

from tightfit.backends.pytorch.simulate.ddp import with_buckets
from tightfit.backends.pytorch.simulate.fsdp_cpu_offload import with_parts_on_host
from tightfit.backends.pytorch.simulate.predict import predict as predict_process
from tightfit.backends.pytorch.simulate.zero import with_zero
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.recipe import Recipe
from tightfit.techniques.parallel import ManyProcesses, Zero
from tightfit.trace import Trace


def predict(recipe: Recipe, device: Device, model: nn.Module | None = None) -> Trace:
    """The trace of the first process. model: a module of one's own. Raises Refused for what the device cannot do."""
    parallel = recipe.parallel
    if not isinstance(parallel, ManyProcesses):
        return predict_process(recipe, device, model)
    if reasons := recipe.refusals(device):
        raise Refused("; ".join(reasons))
    trace = predict_process(parallel.of_one_process(recipe), device, model, ends_apart=not parallel.syncs_every)
    offloads = parallel.cpu_offloads and device.kind == "cuda"
    if parallel.shards and offloads and recipe.precision != "auto":
        trace = with_parts_on_host(trace, recipe.precision.weight_bytes)
    if isinstance(parallel, Zero):
        return with_zero(trace, parallel, offloads)
    return trace if parallel.shards else with_buckets(trace, parallel.process_count)

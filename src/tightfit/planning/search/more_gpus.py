"""Several GPUs: how much faster a choice is on all of them, what binds it, and how many would do where few do not.

Where a model fits one GPU, nothing is divided: `parallel: ddp`. Where it does not, blocks wait in the host's memory, or
weights, gradients and optimizer states are divided among more GPUs: `parallel: fsdp`; where the host's memory is too
small as well, among more machines, or onto a drive.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from tightfit.devices import Device
from tightfit.planning.costs import FitRank, Time
from tightfit.planning.drives import drive_bytes
from tightfit.planning.plan import Scaling
from tightfit.planning.search.budget import TraceBudgetExceeded
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration, Pair
from tightfit.planning.timing.uncertainty import Work
from tightfit.recipe import Recipe
from tightfit.techniques.parallel import Zero
from tightfit.text import counted, percent, seconds, size

BINDING_SHARE = 0.1
"""Share of a step that the device waits, from which on what it waits for is said to bind it."""
GATHERED_SHARE = 0.1
"""Share of all weights, gradients and states that is taken to be there whole at a time, beside a GPU's own part."""


def less_communication(exploration: Exploration, best: Pair) -> list[Pair]:
    """The choice with what communicates less and takes more memory, where it waits for that."""
    (choice, micro), space, found = best, exploration.space, exploration.found[best]
    moved = found.estimate.time.communication
    if "parallel" not in space.fields or moved is None or moved.speed >= 1 - CLOCK_ERROR:
        return []
    others = found.recipe.parallel.communicating_less(micro < space.samples_per_device)
    return [(space.with_value(choice, "parallel", other), micro) for other in others]


def scaling(exploration: Exploration, found: Evaluated) -> Scaling | None:
    """The speed of a choice on several GPUs; None for one. Its efficiency is held to what one GPU does alone with the
    same techniques and its share of the global batch, where it holds the model, by at most one more trace."""
    device, recipe, time = exploration.device, found.recipe, found.estimate.time
    if device.world == 1:
        return None
    alone, efficiency = _alone(exploration, recipe), None
    does_not_hold = "One GPU alone does not hold the model with these techniques"
    last = [f"{does_not_hold}."] if exploration.space.is_divided else []
    each = time.throughput / device.world
    if alone is not None and alone.fit_rank.fits:
        efficiency = each / alone.estimate.time.throughput
        tight = "" if alone.fit_rank.is_safe else " and less than the safety margin free"
        last = [f"One GPU alone, with its share of the global batch{tight}, does {each / efficiency:,.0f}: scaling "
                f"efficiency {percent(efficiency)}."]
    elif alone is not None:
        last = [f"{does_not_hold}: it lacks {alone.estimate.memory.lacking}."]
    binds = _binds(recipe, time)
    said = [f"{device.world:,} GPUs do {time.throughput:,.0f} {time.unit}, {each:,.0f} each; bound by {binds}.",
            *_uneven(recipe.batch_size, device.world)]
    if time.communication is not None:
        moved = time.communication
        said.append(f"Each sends {size(moved.bytes)} a step, which takes {seconds(moved.seconds)} over {moved.link} "
                    f"and makes the step {seconds(moved.added)} longer: {percent(moved.hidden)} of it is hidden "
                    "behind compute.")
    if found.estimate.memory.host_by_category:
        said.append(f"What waits in a machine's memory takes {size(device.cards * found.estimate.memory.host)} of it.")
    return Scaling(gpus=device.world, per_gpu=each, efficiency=efficiency, bound_by=binds, text=" ".join(said + last))


def _uneven(samples: int, world: int) -> list[str]:
    """A sentence where GPUs get unequal shares of a global batch."""
    most, ahead = -(-samples // world), samples % world
    if samples < world:
        return [f"A global batch of {samples:,} leaves {world - samples:,} of the GPUs without a sample: write "
                f"batch_size={world} or more."]
    return [f"A global batch of {samples:,} gives {ahead:,} of the GPUs {most:,} and the others, which wait, "
            f"{most - 1:,}: batch_size={most * world} divides evenly."] if ahead else []


def _alone(exploration: Exploration, recipe: Recipe) -> Evaluated | None:
    if exploration.space.is_divided:
        return None
    one = replace(exploration.device, cards=1, machines=1, network_bandwidth=0.0)
    asked = recipe.parallel.of_one_process(recipe).override(parallel="none")
    with suppress(TraceBudgetExceeded):
        return exploration.evaluate_one(asked, "what one GPU does alone", one)
    return None


def _binds(recipe: Recipe, time: Time) -> str:
    """The bottleneck of a step, in a few words."""
    offloads = recipe.parallel.cpu_offloads or recipe.offloaded.uses_host
    host = "what the host computes" if offloads else "launches by the host"
    waits = {"communication between GPUs": Work.COMMUNICATION, host: Work.HOST,
             "copies from and to the host": Work.TRANSFERS}
    text, share = max(((text, time.work.get(work, 0.0) / time.step_seconds) for text, work in waits.items()),
                      key=lambda pair: pair[1])
    if share >= BINDING_SHARE:
        return f"{text}, for {percent(share)} of a step"
    return "compute, and by memory, for which blocks are recomputed" if recipe.recomputes else "compute"


def more_gpus(exploration: Exploration, found: Evaluated) -> str:
    """The number of GPUs that would hold a divided model, as a sentence; empty where one holds it whole, by the choice
    or another combination. found: the choice, or what comes nearest."""
    device, recipe = exploration.device, found.recipe
    trains_in_full = recipe.mode == "train" and not recipe.trainable.freezes
    if not trains_in_full or device.kind != "cuda" or not recipe.backend.runs_torch:
        return ""
    if found.fit_rank.fits and not _offloads(found) and recipe.parallel.shards:
        return f"{_whole(found, device)}: parallel={recipe.parallel.name} divides them."
    if any(each.fit_rank.fits and not _offloads(each) for each in exploration.found.values()):
        return ""
    count, drive = _enough(exploration, found), _drive(found, device)
    if count is None:
        return drive
    samples = f" batch_size={count}" if recipe.batch_size < count else ""
    return (f"{_whole(found, device)}: with nothing in the host's memory parallel=fsdp divides them among about "
            f"{counted(count, 'such GPU')}; plan with --gpus {count}{samples} for exact figures.{drive and ' '}{drive}")


def _offloads(found: Evaluated) -> bool:
    return found.recipe.offloaded.uses_host or bool(found.estimate.memory.host_by_category)


def _drive(found: Evaluated, device: Device) -> str:
    """Bytes that DeepSpeed leaves on a machine's drive and in memory, as a sentence; empty where memory serves."""
    if not found.estimate.memory.host_missing:
        return ""
    zero = replace(Zero(stage=3, offload="nvme"), processes=device.world)
    moves = drive_bytes(found.recipe, zero, found.parameters // device.machines)
    return (f"The host's memory is too small by {size(found.estimate.memory.host_missing)}: parallel=zero "
            f"parallel.stage=3 parallel.offload=nvme leaves {size(moves.held)} on each machine's drive and "
            f"{size(moves.in_memory)} in its memory; a step reads {size(moves.read)} there and writes "
            f"{size(moves.written)}, for which parallel.nvme_path=<folder> has a drive measured.")


def _held(found: Evaluated) -> float:
    """Bytes of the whole model's weights, gradients and optimizer states, with no copies of weights beside them."""
    precision, optimizer = found.recipe.precision, found.recipe.optimizer
    assert precision != "auto"
    assert optimizer != "auto"
    return (2.0 * precision.weight_bytes + optimizer.bytes_per_parameter(found.recipe)) * found.parameters


def _whole(found: Evaluated, device: Device) -> str:
    memory = found.estimate.memory
    return (f"Weights, gradients and optimizer states are {size(_held(found))} whole, and a GPU's "
            f"{size(device.memory_bytes)} leave {size(memory.capacity - memory.margin)} for them and for activations, "
            f"beside {size(memory.context)} of CUDA context and a safety margin of {size(memory.margin)}")


def _enough(exploration: Exploration, found: Evaluated) -> int | None:
    """The GPUs, twice those at hand or a power of two as many, whose parts would fit, about; None where what is not
    divided would not, and where those at hand would do, which lack memory for other reasons."""
    held, micro = _held(found), found.recipe.resolved_micro_batch
    each = max(found.passes_when_accumulating - found.held, 0) / micro  # micro_batch_size=1 is always possible
    room = exploration.usable_bytes(FitRank.SAFE) - each - GATHERED_SHARE * held
    if room <= 0:
        return None
    at_hand = count = exploration.device.world
    while held / count > room:
        count *= 2
    return count if count > at_hand else None

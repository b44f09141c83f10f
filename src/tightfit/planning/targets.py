"""The device of a plan: the machine's own, one of the catalogue, or a card of which only the memory is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tightfit.calibration import Calibration, load
from tightfit.devices import (
    Device,
    device_of_memory,
    find_device,
    listed_device,
    parse_memory,
    says_memory,
    with_memory,
)
from tightfit.errors import Refused
from tightfit.system import host_memory


@dataclass(frozen=True, kw_only=True)
class Target:
    """The device that is planned for.

    calibration: as measured on the device, where it is this machine's own; None elsewhere.
    """

    device: Device
    calibration: Calibration | None = None

    @property
    def is_guessed_processor(self) -> bool:
        """Whether it is a processor that was not measured: its choice between formats may cost more than it gains."""
        return self.device.kind == "cpu" and self.calibration is None


def gpu_target(gpu: str | None, gpu_memory: str | None, own: Callable[[], Device | None]) -> Target:
    """The GPU that a person names.

    gpu: a name of the catalogue, or a size such as `24GB` of any card; None for this machine's own, or for any card of
        `gpu_memory`.
    gpu_memory: a size such as `24GB`, instead of the GPU's own.
    own: the machine's own CUDA device, as the framework reports it; None where it has none.

    Raises RecipeError for a name or a size that means nothing, Refused where this machine has no GPU.
    """
    memory = None if gpu_memory is None else parse_memory(gpu_memory)
    if gpu is not None and memory is None and says_memory(gpu):
        memory = parse_memory(gpu, "gpu")
        gpu = None
    if gpu is None and memory is not None:
        return Target(device=device_of_memory(memory))
    named = None if gpu is None else find_device(gpu)
    mine = own()
    if named is None and mine is None:
        raise Refused("gpu: this machine has no CUDA device to plan for; write --gpu with a name such as rtx-4090 "
                      "(tightfit gpus lists them), several as --gpu l4,rtx-4090, or all of them as --gpu all; or "
                      "--gpu cpu, or a size as --gpu 24GB")
    if named is None or (mine is not None and listed_device(mine.name) == named):
        assert mine is not None
        device, calibration = replace(with_figures(mine) if named is None else named,
                                      host_bytes=host_memory().total), load(mine.name)
    else:
        device, calibration = named, None
    return Target(device=device if memory is None else with_memory(device, memory), calibration=calibration)


def own_target(own: Device) -> Target:
    """This machine's own device, with its calibration."""
    if own.kind == "cpu":
        return Target(device=own, calibration=load(own.name, threads=own.units))
    return Target(device=replace(with_figures(own), host_bytes=host_memory().total), calibration=load(own.name))


def with_figures(own: Device) -> Device:
    """The machine's own CUDA device with the figures that the catalogue has of it, or else of a card of its size."""
    like = listed_device(own.name)
    if like is None:
        like = device_of_memory(own.memory_bytes)
        like = replace(like, notes=f"{own.name} is not in the catalogue; {like.notes}")
    return replace(like, name=own.name, memory_bytes=own.memory_bytes, capability=own.capability, units=own.units)

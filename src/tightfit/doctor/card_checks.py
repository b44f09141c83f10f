"""Judging each card: memory, number formats, power, temperature, throttling, processes, PCIe.

Plugs as PCI-SIG rates them and the single-GPU guides quote them: the slot gives 75 W, a 6-pin lead 75 W, an 8-pin lead
150 W, a 12-pin or 12V-2x6 lead (12VHPWR before) 500 to 600 W, by what its cable and supply are marked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from tightfit.catalogue import PCIE_3, PCIE_4, PCIE_5
from tightfit.devices import GIB, TENSOR_CORES
from tightfit.doctor.findings import Finding, FindingBuilder
from tightfit.doctor.readings import Gpu, Readings
from tightfit.text import size

LITTLE_FREE, WORTH_SAYING = 600 << 20, 256 << 20
"""Bytes free below which not even a CUDA context has room; bytes in use above which they are worth a word."""
BEST, GOOD, THROTTLING = (70, 75), 80, 84
"""Degrees Celsius under load: the best range, good below, throttling likely from (to 90), as the guides give them."""
RANGE = f"good is below {GOOD} C, best {BEST[0]} to {BEST[1]} C under load, throttling starts at {THROTTLING} to 90 C"
BUSY_PERCENT = 20
"""Percent of utilization from which a card is at work."""

LANE_SPEED = {1: 0.25, 2: 0.5, 3: PCIE_3, 4: PCIE_4, 5: PCIE_5, 6: 7.56}
"""GB/s of one lane in one direction, by PCIe generation (PCI-SIG; the sixth after its flit encoding)."""

COOLING = "better airflow, more fan, dust out, or a lower limit with nvidia-smi -pl"
THROTTLES = {
    "power-cap": ("the power limit holds the clocks down", "the usual state of a full load; a higher limit (nvidia-smi "
                  "-pl, where the card allows it) gives a little speed for much heat"),
    "hardware-slowdown": ("the card halves its clocks or worse to protect itself", "look at its temperature, its power "
                          "cables and the supply"),
    "software-thermal": ("the driver lowers the clocks because the card is too warm", COOLING),
    "hardware-thermal": ("the card lowers its clocks because it is too hot", f"stop the load; {COOLING}"),
    "power-brake": ("the power supply signals the card to slow down", "look at the power cables and whether the supply "
                    "has enough watts to spare"),
}  # fmt: skip
"""Those of `cards.REASONS` that cost speed: what happens, and what to do."""

SLOT_WATTS = 75
CABLES = (
    (0, "none: the slot's 75 W carry it"),
    (75, "one 6-pin (75 W) or one 8-pin (150 W)"),
    (150, "one 8-pin (150 W)"),
    (225, "an 8-pin (150 W) and a 6-pin (75 W), two 8-pin, or one 12V-2x6 (12-pin)"),
    (300, "two 8-pin (150 W each), or one 12V-2x6 (12-pin, 500 to 600 W)"),
    (450, "three 8-pin (150 W each), or one 12V-2x6 (12-pin, 500 to 600 W)"),
    (600, "one 12V-2x6 (12-pin) marked for 600 W, or its adapter with four 8-pin (150 W each)"),
)
"""Watts on top of the slot's, and the least cables that carry them."""
MODULES = re.compile(r"SXM|HBM3|\bH20\b|\bH200$|\bB[23]00\b|\bG[BH]\d{2,3}\b|Laptop|Max-Q|Orin|Thor", re.IGNORECASE)
"""Names of cards that sit on a board of their own, or in a laptop, and have no power cables. `NVIDIA H100 80GB HBM3`
and `NVIDIA H200` are the SXM modules; the ones with power cables are called PCIe or NVL."""
REST_OF_MACHINE, RESERVE = 250, 1.25
"""Watts for processor, disks and fans, and supply over load: rules of thumb, not measurements."""


def check_card(gpu: Gpu, say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """Checks of a single card."""
    if gpu.error is not None:
        yield say("problem", "error", f"does not answer: {gpu.error}", "restart the machine; if it comes back, look at "
                  "its power cables and temperature, and for Xid errors in `dmesg`")
        return
    memory = f", {size(gpu.memory_total)}" if gpu.memory_total else ""
    capability = ", compute capability {}.{}".format(*gpu.capability) if gpu.capability else ""
    yield say("ok", "name", f"{gpu.name}{memory}{capability}")
    yield from _memory(gpu, say)
    if gpu.capability is not None:
        yield _formats(gpu.capability, say)
    if gpu.power_limit is not None:
        yield from _power(gpu, gpu.power_limit, say)
    if gpu.temperature is not None:
        yield _temperature(gpu, gpu.temperature, say)
    for reason in (reason for reason in gpu.throttling or () if reason in THROTTLES):
        what, action = THROTTLES[reason]
        calm = reason == "power-cap" and gpu.power_limit == gpu.power_limit_default
        yield say("info" if calm else "advice", "throttling", f"{reason}: {what}", action)
    if gpu.compute_mode == "prohibited" or (gpu.compute_mode == "exclusive" and gpu.processes):
        yield say("problem", "compute_mode", f"compute mode is {gpu.compute_mode}, so that no CUDA program may start"
                  + (" while a process has the card" if gpu.compute_mode == "exclusive" else ""),
                  f"sudo nvidia-smi -i {gpu.index} -c DEFAULT")
    if gpu.mig:
        yield say("info", "mig", "is divided into instances (MIG): a run gets one of them, with its share of the "
                  "memory", "plan with --gpu-memory and that instance's size")
    if gpu.memory_errors:
        yield say("advice", "memory_errors", f"{gpu.memory_errors} uncorrected memory errors since the driver was "
                  "loaded", "restart the machine so that the bad rows are replaced; if they come back, have the card "
                  "replaced")
    if gpu.pcie_generation and gpu.pcie_width:
        yield from _pcie(gpu, gpu.pcie_generation, gpu.pcie_width, say)


def check_supply(gpus: tuple[Gpu, ...], say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """The power supply that all cards together ask for."""
    limits = [gpu.power_limit for gpu in gpus if gpu.power_limit and has_power_cables(gpu.name)]
    if limits and readings.host.container != "wsl":
        watts = math.ceil((sum(limits) + REST_OF_MACHINE) * RESERVE / 50) * 50
        yield say("info", "power_limit", f"the cards' limits sum to {sum(limits):.0f} W; with processor, disks and "
                  f"fans that asks for a supply of about {watts} W (a rule of thumb: "
                  f"{REST_OF_MACHINE} W for the rest, a quarter in reserve)",
                  "in a machine of your own, compare with the label on the supply", value=sum(limits))


def busy(gpu: Gpu) -> bool:
    """Whether the card is known to be at work."""
    return gpu.utilization is not None and gpu.utilization >= BUSY_PERCENT


def has_power_cables(name: str) -> bool:
    """Whether a card of that name plugs into a slot and is fed by cables."""
    return MODULES.search(name) is None


def power_cables(watts: float) -> str | None:
    """The least cables that carry a power limit, the slot's share taken off; None above what cables carry."""
    return next((plugs for most, plugs in CABLES if watts - SLOT_WATTS <= most), None)


def _memory(gpu: Gpu, say: FindingBuilder) -> Iterator[Finding]:
    others = gpu.processes or ()
    names = ", ".join(f"{p.name or 'a process'} ({p.pid}{f', {size(p.memory)}' if p.memory else ''})" for p in others)
    if gpu.memory_total is not None and gpu.memory_used is not None:
        free = gpu.memory_total - gpu.memory_used - (gpu.memory_reserved or 0)
        used = (f"{size(gpu.memory_used)} of {size(gpu.memory_total)} in use{f', by {names}' if names else ''}"
                f"{f', {size(gpu.memory_reserved)} kept by the driver' if gpu.memory_reserved else ''}")
        if free < LITTLE_FREE:
            yield say("problem", "memory_used", f"{used}: no room for a CUDA context, so that nothing can start",
                      "end what holds it (nvidia-smi lists it, `kill` ends it)")
        elif gpu.memory_used > WORTH_SAYING:
            desktop = gpu.display and gpu.memory_used < GIB
            yield say("info" if desktop else "advice", "memory_used", used,
                      f"end what need not run, or plan for what is left: --gpu-memory {free / GIB:.1f}GiB")
        else:
            yield say("ok", "memory_used", used)
    elif others:
        yield say("advice", "processes", f"other processes are on the card: {names}", "end them before training",
                  value=len(others))
    if others and busy(gpu):
        yield say("advice", "utilization", f"busy {gpu.utilization} % of the time: a run that starts now shares the "
                  "card's speed", "wait for what runs there, or end it")


def _formats(capability: tuple[int, int], say: FindingBuilder) -> Finding:
    served = [name for name, least in TENSOR_CORES.items() if capability >= least]
    missing = [name for name in TENSOR_CORES if name not in served]
    if not served:
        return say("advice", "capability", "no tensor cores: half precision saves memory and hardly time",
                   "write precision=fp32 or precision=fp16")
    sentence = "tensor cores for " + "; not ".join(", ".join(formats) for formats in (served, missing) if formats)
    if "bf16" in missing:
        return say("advice", "capability", sentence,
                   "write precision=fp16, which scales the loss; a model pretrained in bf16 may overflow in it")
    return say("ok", "capability", sentence)


def _power(gpu: Gpu, limit: float, say: FindingBuilder) -> Iterator[Finding]:
    default, most = gpu.power_limit_default, gpu.power_limit_max
    drawn = "" if gpu.power_draw is None else f", {gpu.power_draw:.0f} W drawn now"
    if default is not None and limit < default - 1:
        yield say("advice", "power_limit", f"power is limited to {limit:.0f} W of {default:.0f} W{drawn}: slower under "
                  "full load", f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}, if power cables and "
                  "cooling allow it")
    else:
        settable = f", up to {most:.0f} W can be set" if most is not None and most > limit + 1 else ""
        yield say("ok", "power_limit", f"power limit {limit:.0f} W{settable}{drawn}")
    watts = max(limit, default or 0)
    if has_power_cables(gpu.name) and (plugs := power_cables(watts)):
        yield say("info", "power_limit", f"power cables for {watts:.0f} W: {plugs}; each plug on a cable of its own "
                  "from the supply, no pigtail (two plugs on one cable); the slot gives 75 W besides")


def _temperature(gpu: Gpu, now: int, say: FindingBuilder) -> Finding:
    if gpu.temperature_shutdown is not None and now >= gpu.temperature_shutdown - 2:
        return say("problem", "temperature", f"{now} C: the card shuts itself off at {gpu.temperature_shutdown} C",
                   "stop the load and see to its cooling")
    if now >= GOOD:
        own = f"; this card's own limit is {gpu.temperature_slowdown} C" if gpu.temperature_slowdown else ""
        return say("advice", "temperature", f"{now} C: {RANGE}{own}", COOLING)
    again = "" if busy(gpu) else "; look again while it trains"
    return say("ok", "temperature", f"{now} C: {RANGE}{again}")


def _pcie(gpu: Gpu, generation: int, width: int, say: FindingBuilder) -> Iterator[Finding]:
    most_generation = gpu.pcie_generation_max or generation
    most_width = max(gpu.pcie_width_card or 0, gpu.pcie_width_max or 0, width)
    lane, best = (LANE_SPEED.get(number, LANE_SPEED[max(LANE_SPEED)]) for number in (generation, most_generation))
    if width < most_width:
        slot = gpu.pcie_width_max is not None and gpu.pcie_width_max < most_width
        yield say("advice", "pcie_width", f"PCIe runs with {width} of the card's {most_width} lanes "
                  f"({best * width:.1f} of {best * most_width:.1f} GB/s each way): offload, loading data and exchange "
                  "between cards take that much longer; training that stays on the card hardly notices",
                  f"{'its slot has only that many: ' if slot else ''}put the card into a x{most_width} slot that is "
                  "wired to the processor, without a riser; look whether another card or an SSD shares the lanes")
    if generation < most_generation and busy(gpu):
        yield say("advice", "pcie_generation", f"PCIe {generation}.0 under load, of {most_generation}.0 that card and "
                  f"slot serve: transfers at {lane * width:.1f} of {best * width:.1f} GB/s",
                  "set the slot's generation in the firmware; a riser cable may be made for an older one")
    elif width == most_width:
        saving = f", {generation}.0 while it is idle" if generation < most_generation else ""
        yield say("ok", "pcie_width", f"PCIe {most_generation}.0 x{width}{saving}: {best * width:.1f} GB/s each way")

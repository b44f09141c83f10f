"""What to say of each card: memory, number formats, power, temperature, throttling, processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tightfit.devices import GIB
from tightfit.doctor.findings import Finding, Severity
from tightfit.doctor.power import has_leads, leads, supply
from tightfit.doctor.readings import Gpu, Readings
from tightfit.planning.wording import size

NO_ROOM = 600 << 20
"""Bytes free below which not even a CUDA context with its kernels has room."""
WORTH_SAYING = 256 << 20

BEST, GOOD, THROTTLING = (70, 75), 80, 84
"""Degrees Celsius under load: the best range, good below, throttling likely from (to 90), as the guides give them."""
RANGE = f"good is below {GOOD} C, best {BEST[0]} to {BEST[1]} C under load"
FROM = f"from about {THROTTLING} to 90 C"
BUSY = 20
"""Percent of utilization from which a card is at work."""

FORMATS = {"fp16": (7, 0), "bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9)}
"""The compute capability from which tensor cores have a format (CUDA C++ programming guide, compute capabilities)."""

THROTTLES = {
    "power-cap": ("the power limit holds the clocks down", "the usual state of a full load; a higher limit (nvidia-smi "
                  "-pl, where the card allows it) gives a little speed for much heat"),
    "hardware-slowdown": ("the card halves its clocks or worse to protect itself", "look at its temperature, its power "
                          "leads and the supply"),
    "software-thermal": ("the driver lowers the clocks because the card is too warm", "better airflow, more fan, dust "
                         "out, or a lower limit with nvidia-smi -pl"),
    "hardware-thermal": ("the card lowers its clocks because it is too hot", "stop the load and see to its cooling: "
                         "fans, dust, airflow, heat sink"),
    "power-brake": ("the power supply tells the card to slow down", "look at the power leads and whether the supply "
                    "has enough watts to spare"),
}  # fmt: skip
"""Of `nvml.REASONS` those that cost speed: what happens, and what to do. Idle clocks and clocks that someone set are
none."""


class _Say(Protocol):
    """Makes a finding on one card, from the name of one of its fields."""

    def __call__(self, severity: Severity, name: str, sentence: str, action: str = "") -> Finding: ...


def busy(gpu: Gpu) -> bool | None:
    """Whether the card is at work; None where it does not say."""
    return None if gpu.utilization is None else gpu.utilization >= BUSY


def gpu_checks(readings: Readings) -> Iterator[Finding]:
    """All that concerns the cards by themselves."""
    for place, gpu in enumerate(readings.gpus):
        yield from _checks(gpu, f"GPU {gpu.index}", f"gpus[{place}]")
    limits = [g.power_limit for g in readings.gpus if g.power_limit and has_leads(g.name)]
    if limits and readings.host.container != "wsl":
        total = sum(limits)
        yield Finding(
            topic="power", severity="info", field="gpus[*].power_limit", value=total,
            sentence=f"the cards' limits sum to {total:.0f} W; with processor, disks and fans that asks for a supply "
                     f"of about {supply(limits)} W (a rule of thumb: 250 W for the rest, a quarter in reserve)",
            action="in a machine of your own, compare with the label on the supply",
        )  # fmt: skip


def _checks(gpu: Gpu, topic: str, field: str) -> Iterator[Finding]:
    def say(severity: Severity, name: str, sentence: str, action: str = "") -> Finding:
        value = len(gpu.processes or ()) if name == "processes" else getattr(gpu, name)
        return Finding(topic=topic, severity=severity, sentence=sentence, action=action, field=f"{field}.{name}",
                       value=list(value) if isinstance(value, tuple) else value)

    if gpu.error is not None:
        yield say("problem", "error", f"does not answer: {gpu.error}", "restart the machine; if it comes back, look at "
                  "its power leads and temperature, and for Xid errors in `dmesg`")
        return
    words = [gpu.name]
    words += [size(gpu.memory_total)] if gpu.memory_total else []
    words += [f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"] if gpu.capability else []
    yield say("ok", "name", ", ".join(words))
    yield from _memory(gpu, say)
    yield from _formats(gpu, say)
    yield from _power(gpu, say)
    yield from _temperature(gpu, say)
    for reason in gpu.throttling or ():
        if reason in THROTTLES:
            what, action = THROTTLES[reason]
            calm = reason == "power-cap" and gpu.power_limit == gpu.power_limit_default
            yield say("info" if calm else "advice", "throttling", f"{reason}: {what}", action)
    if gpu.compute_mode == "prohibited":
        yield say("problem", "compute_mode", "compute mode is prohibited: no CUDA program may start",
                  f"sudo nvidia-smi -i {gpu.index} -c DEFAULT")
    elif gpu.compute_mode == "exclusive" and gpu.processes:
        yield say("problem", "compute_mode", "compute mode is exclusive and a process has the card",
                  f"end that process, or sudo nvidia-smi -i {gpu.index} -c DEFAULT")
    if gpu.mig:
        yield say("info", "mig", "is divided into instances (MIG): a run gets one of them, with its share of the "
                  "memory", "plan with --gpu-memory and that instance's size")
    if gpu.memory_errors:
        yield say("advice", "memory_errors", f"{gpu.memory_errors} uncorrected memory errors since the driver was "
                  "loaded", "restart the machine so that the bad rows are replaced; if they come back, have the card "
                  "replaced")


def _memory(gpu: Gpu, say: _Say) -> Iterator[Finding]:
    others = gpu.processes or ()
    names = ", ".join(f"{p.name or 'a process'} ({p.pid}{f', {size(p.memory)}' if p.memory else ''})" for p in others)
    if gpu.memory_total is not None and gpu.memory_used is not None:
        free = gpu.memory_total - gpu.memory_used - (gpu.memory_reserved or 0)
        used = f"{size(gpu.memory_used)} of {size(gpu.memory_total)} in use"
        kept = f", {size(gpu.memory_reserved)} kept by the driver" if gpu.memory_reserved else ""
        held = f", by {names}" if names else ""
        if free < NO_ROOM:
            yield say("problem", "memory_used", f"{used}{held}{kept}: no room for a CUDA context, so that nothing can "
                      "start", "end what holds it (nvidia-smi lists it, `kill` ends it)")
        elif gpu.memory_used > WORTH_SAYING:
            left = f"plan for what is left: --gpu-memory {free / GIB:.1f}GiB" if free > GIB else "there is little left"
            yield say("info" if gpu.display and gpu.memory_used < GIB else "advice", "memory_used",
                      f"{used}{held}{kept}", f"{'end what need not run, or ' if others and free > GIB else ''}{left}")
        else:
            yield say("ok", "memory_used", f"{used}{held}{kept}")
    elif others:
        yield say("advice", "processes", f"other processes are on the card: {names}", "end them before training")
    if others and busy(gpu):
        yield say("advice", "utilization", f"busy {gpu.utilization} % of the time: a run that starts now shares the "
                  "card's speed", "wait for what runs there, or end it")


def _formats(gpu: Gpu, say: _Say) -> Iterator[Finding]:
    if gpu.capability is None:
        return
    served = [name for name, least in FORMATS.items() if gpu.capability >= least]
    missing = [name for name in FORMATS if name not in served]
    without = f"; not {', '.join(missing)}" if missing else ""
    if not served:
        yield say("advice", "capability", "no tensor cores: half precision saves memory and hardly time",
                  "write precision=fp32 or precision=fp16")
    elif "bf16" in missing:
        yield say("advice", "capability", f"tensor cores for {', '.join(served)}{without}",
                  "write precision=fp16, which scales the loss; a model pretrained in bf16 may overflow in it")
    else:
        yield say("ok", "capability", f"tensor cores for {', '.join(served)}{without}")


def _power(gpu: Gpu, say: _Say) -> Iterator[Finding]:
    limit, default = gpu.power_limit, gpu.power_limit_default
    if limit is None:
        return
    drawn = "" if gpu.power_draw is None else f", {gpu.power_draw:.0f} W drawn now"
    if default is not None and limit < default - 1:
        yield say("advice", "power_limit", f"power is limited to {limit:.0f} W of {default:.0f} W{drawn}: slower under "
                  "full load", f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}, if leads and cooling allow it")
    else:
        most = gpu.power_limit_max
        room = f", up to {most:.0f} W can be set" if most is not None and most > limit + 1 else ""
        yield say("ok", "power_limit", f"power limit {limit:.0f} W{room}{drawn}")
    watts = max(limit, default or 0)
    if has_leads(gpu.name) and (plugs := leads(watts)):
        cables = "" if plugs.startswith("none") else (
            "; each plug on a cable of its own from the supply, no pigtail (two plugs on one cable); the slot gives "
            "75 W besides")
        yield say("info", "power_limit", f"power leads for {watts:.0f} W: {plugs}{cables}")


def _temperature(gpu: Gpu, say: _Say) -> Iterator[Finding]:
    now = gpu.temperature
    if now is None:
        return
    own = f"; this card's own limit is {gpu.temperature_slowdown} C" if gpu.temperature_slowdown else ""
    cool = "more fan, better airflow, dust out, or a lower limit with nvidia-smi -pl"
    if gpu.temperature_shutdown is not None and now >= gpu.temperature_shutdown - 2:
        yield say("problem", "temperature", f"{now} C: the card shuts itself off at {gpu.temperature_shutdown} C",
                  "stop the load and see to its cooling")
    elif now >= THROTTLING:
        yield say("advice", "temperature", f"{now} C: cards throttle {FROM}, and age faster{own}", cool)
    elif now >= GOOD:
        yield say("advice", "temperature", f"{now} C: {RANGE}{own}", cool)
    elif busy(gpu) is False:
        yield say("ok", "temperature", f"{now} C, idle: look again while it trains; {RANGE}, throttling starts {FROM}")
    else:
        band = f"in the best range, {BEST[0]} to {BEST[1]} C" if BEST[0] <= now <= BEST[1] else f"good: below {GOOD} C"
        yield say("ok", "temperature", f"{now} C, {band}")

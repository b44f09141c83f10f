"""Measuring this machine, for plans to be calibrated by."""

from __future__ import annotations

from pathlib import Path

from tightfit.backends import load_backend
from tightfit.calibration import FOLDER, Calibration, Progress, save
from tightfit.devices import listed_device
from tightfit.errors import Refused
from tightfit.recipe import Recipe


def calibrate(device: str, progress: Progress | None = None, folder: Path = FOLDER) -> tuple[Calibration, Path]:
    """Measure this machine's device and keep the result in `folder`, for plans to find.

    device: `auto` for the CUDA device where there is one and the processor elsewhere, `cpu` or `cuda`.
    Raises Refused where there is no such device, or it was kept busy meanwhile; TightfitError where the result cannot
    be written.
    """
    import torch

    from tightfit.backends.pytorch.measure.calibration.measure import measure

    own = load_backend("pytorch").device(Recipe.from_dict({"device": device}))
    try:
        calibration = measure(torch.device(own.kind), progress)
    except torch.OutOfMemoryError:
        raise Refused(f"device: {own.name} has too little free memory to measure; end what else runs on it") from None
    if calibration.disturbed:
        raise Refused(f"device: {calibration.disturbed}; nothing was kept. End what else runs, and calibrate again")
    return calibration, save(calibration, folder)


def calibration_rows(calibration: Calibration) -> list[tuple[str, str]]:
    """The measurements as a table: name and figure, next to the data sheet's where there is one."""
    rows = [("device", calibration.device), ("processor", calibration.processor), ("PyTorch", calibration.torch)]
    rows += [("threads", str(calibration.threads))] if calibration.threads else []
    sheet = _data_sheet(calibration.device)

    def beside(name: str, rate: float, unit: float) -> str:
        known = sheet.get(name, 0.0)
        return f", {rate / known:.0%} of the data sheet's {known / unit:,.0f}" if known else ""

    for number_format, grid in calibration.matmuls.items():
        best = max(rate for plane in grid.rates for row in plane for rate in row)
        rows.append((f"matmuls in {number_format}",
                     f"{best / 1e12:,.2f} TFLOP/s at best{beside(number_format, best, 1e12)}"))
    for direction in ("forward", "backward"):
        rates = [(max(curve.values), name) for key, curves in calibration.attention.items()
                 if key.startswith(direction) for name, curve in curves.items()]
        if rates:
            rate, number_format = max(rates)
            rows.append((f"attention {direction}", f"{rate / 1e12:,.2f} TFLOP/s at best, in {number_format}"))
    if (add := calibration.memory.get("add", {}).get("float32")) is not None:
        bandwidth = add.sizes[-1] / add.values[-1]
        rows.append(("memory", f"{bandwidth / 1e9:,.1f} GB/s in additions{beside('bandwidth', bandwidth, 1e9)}"))
    if calibration.host:
        phases = ", ".join(f"{phase} {seconds * 1e6:,.1f}" for phase, seconds in calibration.host.items())
        rows.append(("host", f"microseconds an op: {phases}"))
    if (link := calibration.link) is not None:
        for name, copies in (("host to device", link.to_device), ("device to host", link.to_host)):
            alone, both, pageable = (f"{rate / 1e9:,.1f}" for rate in (copies.alone, copies.both_ways, copies.pageable))
            rows.append((name, f"{alone} GB/s{beside('link', copies.alone, 1e9)}; {both} while copies go both ways; "
                               f"{pageable} from memory that is not page-locked"))
    elif calibration.kind == "cuda":
        rows.append(("host to device", "not measured: no memory of the host could be page-locked"))
    return rows


def _data_sheet(device: str) -> dict[str, float]:
    """The catalogue's peaks, by the names that a calibration has, the bandwidth, and PCIe's as `link`; empty for a
    device that it lacks."""
    card = listed_device(device)
    if card is None:
        return {}
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "tf32": "tf32"}
    peaks = {name: card.flops.get(short, 0.0) for name, short in names.items()}
    return {"bandwidth": card.bandwidth, "link": card.pcie_bandwidth, **peaks}

"""A profile: one recipe's training step as it was measured, beside what was predicted for it; and its folder.

    RUN_DIR/profile/profile.json, measured.json.gz, predicted.json.gz
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tightfit.devices import Device
from tightfit.errors import RecipeError, ReportError
from tightfit.files import replacing
from tightfit.recipe import Recipe
from tightfit.trace import Phase, Trace
from tightfit.trace.file import load_trace, save_trace

FORMAT, VERSION = "tightfit-profile", 1
FOLDER, VALUES = "profile", "profile.json"
TRACES = ("measured", "predicted")
LARGEST = 1e18
"""No figure of a profile is as large: bytes, seconds and operations a second stay below."""
LIMIT = 500_000
"""The most ops, and the most allocations, of a trace that are read for a report: more are sampled."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured training step beside its predicted one. Seconds are wall seconds, bytes are bytes.

    recipe: resolved. measured, predicted: None where there was none. step_seconds: of a step without instruments, the
        wait for its data included; the median of several; 0 where nothing was measured.
    phase_seconds: the same by phase (data, forward, backward with recomputation, optimizer); they sum to it.
        predicted_seconds: the time model's, by the same phases; empty without a prediction.
    peak_bytes: the allocator's own figure where it has one, else the trace's; 0 where nothing was measured.
        predicted_peak_bytes: 0 without a prediction. capacity_bytes: what the device has for the allocator; 0 where not
        known.
    calibrated: whether the predicted times come from this machine's own ceilings.
    overhead: how many times as long the step took that the trace is of.
    readings: what the driver said while steps ran, a series each: utilization, memory, power, temperature, clocks.
    versions: of the libraries, by name. notes: sentences about how sure it is.
    """

    recipe: Recipe
    device: Device
    step_seconds: float
    measured: Trace | None = None
    predicted: Trace | None = None
    phase_seconds: Mapping[Phase, float] = field(default_factory=dict)
    predicted_seconds: Mapping[Phase, float] = field(default_factory=dict)
    peak_bytes: int = 0
    predicted_peak_bytes: int = 0
    capacity_bytes: int = 0
    calibrated: bool = False
    overhead: float = 1.0
    readings: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


PLAIN = ("step_seconds", "peak_bytes", "predicted_peak_bytes", "capacity_bytes", "calibrated", "overhead", "versions",
         "notes")  # fmt: skip
"""Fields that are written as they are."""


def save(profile: Profile, folder: Path) -> Path:
    """Write a profile into `folder`/profile, each file whole or not at all, and return that path.

    profile.json is written last and removed first: where it stands, the traces beside it are its own. Raises OSError.
    """
    home = folder / FOLDER
    home.mkdir(parents=True, exist_ok=True)
    (home / VALUES).unlink(missing_ok=True)
    for name in TRACES:
        trace = getattr(profile, name)
        path = home / f"{name}.json.gz"
        if trace is None:
            path.unlink(missing_ok=True)
        else:
            save_trace(trace, path)
    values = {
        "format": FORMAT, "version": VERSION, "recipe": profile.recipe.to_dict(), "device": asdict(profile.device),
        **{name: getattr(profile, name) for name in PLAIN},
        "phase_seconds": dict(profile.phase_seconds), "predicted_seconds": dict(profile.predicted_seconds),
        "readings": {name: list(series) for name, series in profile.readings.items()},
        "traces": [name for name in TRACES if getattr(profile, name) is not None],
    }  # fmt: skip
    values["versions"] = dict(profile.versions)
    with replacing(home / VALUES) as temporary:
        temporary.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", "utf-8")
    return home


def load(folder: Path, limit: int | None = LIMIT) -> Profile:
    """The profile in a run's folder, or in that folder's `profile`. limit: as of `load_trace`.

    Raises ReportError for a folder that holds none, one that is damaged, or one of a newer version.
    """
    home = next((home for home in (folder / FOLDER, folder) if (home / VALUES).is_file()), None)
    if home is None:
        raise ReportError(f"{folder}: {_missing(folder)}; write a folder that `tightfit profile RECIPE` made")
    path = home / VALUES
    try:
        values = json.loads(path.read_text("utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ReportError(f"{path}: this is no profile of tightfit's; write a folder that `tightfit profile` made")
    version = values.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise ReportError(f"{path}: the profile is of version {version!r}, and this tightfit reads up to {VERSION}; "
                          "update tightfit, or read it with the one that wrote it")
    try:
        plain = _plain(values)
        named = [name for name in TRACES if name in values["traces"]]
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecipeError) as error:
        raise _damaged(path, error) from None
    traces = {name: load_trace(home / f"{name}.json.gz", limit) for name in named}
    return Profile(**plain, measured=traces.get("measured"), predicted=traces.get("predicted"))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """All fields but the traces, each of its type. Raises ValueError and its like."""
    device = dict(values["device"])
    if device["kind"] not in ("cpu", "cuda"):
        raise ValueError(f"device of kind {device['kind']!r}")
    if device.get("capability") is not None:
        major, minor = device["capability"]
        device["capability"] = (int(major), int(minor))
    device["flops"] = {str(name): _number(peak) for name, peak in device["flops"].items()}
    for name in ("memory_bytes", "units", "bandwidth"):
        _number(device[name])
    readings = {
        str(name): tuple(None if value is None else float(value) for value in series)
        for name, series in values["readings"].items()
    }
    recipe = Recipe.from_dict(values["recipe"])
    if still_open := recipe.open_choices():
        raise ValueError(f"its recipe says nothing of {', '.join(still_open)}")
    return {
        "recipe": recipe,
        "device": Device(**device),
        "step_seconds": _number(values["step_seconds"]),
        "phase_seconds": _by_phase(values["phase_seconds"]),
        "predicted_seconds": _by_phase(values["predicted_seconds"]),
        **{name: int(_number(values[name])) for name in ("peak_bytes", "predicted_peak_bytes", "capacity_bytes")},
        "calibrated": bool(values["calibrated"]),
        "overhead": _number(values["overhead"]),
        "readings": readings,
        "versions": {str(name): str(version) for name, version in values["versions"].items()},
        "notes": tuple(str(note) for note in values["notes"]),
    }


def _by_phase(values: Mapping[str, Any]) -> dict[Phase, float]:
    return {Phase(phase): _number(seconds) for phase, seconds in values.items()}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
        raise ValueError(f"{repr(value)[:40]} should be a number from 0 up to {LARGEST:.0e}")
    return value


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no finite number")


def _missing(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "this is no folder"
    return "this folder holds no profile"


def _damaged(path: Path, reason: object) -> ReportError:
    return ReportError(f"{path}: the profile is damaged ({reason}); profile again")

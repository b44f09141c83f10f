"""A profile: one recipe's training step, measured and predicted; and its folder.

    RUN_DIR/profile/profile.json, measured.json.gz, predicted.json.gz
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from tightfit.devices import Device
from tightfit.errors import RecipeError, ReportError
from tightfit.files import write_atomically
from tightfit.models import GIVEN_MODULE
from tightfit.profiling import FOLDER
from tightfit.recipe import Recipe
from tightfit.recipe.sections import GIVEN_ROWS
from tightfit.trace import Phase, Trace
from tightfit.trace.file import load_trace, save_trace, wrong_fields
from tightfit.trace.lanes import Stretch
from tightfit.training.run_folder import RECIPE

FORMAT, VERSION = "tightfit-profile", 1
NOT_PREDICTED = "not predicted: "
"""Beginning of the note that says why a step has no prediction."""
VALUES_FILE = "profile.json"
TRACES = ("measured", "predicted")


def _resolved(values: Any) -> Recipe:
    recipe = values if isinstance(values, Recipe) else Recipe.from_dict(values)
    if still_open := recipe.open_choices():
        raise ValueError(f"its recipe says nothing of {', '.join(still_open)}")
    return recipe


Amount = Annotated[float, Field(strict=True, ge=0, lt=1e18)]
Bytes = Annotated[int, Field(strict=True, ge=0, lt=10**18)]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A training step, measured and predicted. Seconds are wall seconds, bytes are bytes.

    recipe: resolved. measured, predicted: None where there was none. step_seconds: of a step without instruments, the
        wait for its data included; the median of several; 0 where nothing was measured.
    tokens: real ones that a measured step read, the mean of several (images: samples); 0 where that is not known.
    phase_seconds: the same by phase (data, forward, backward with recomputation, optimizer); they sum to it.
        predicted_seconds: the time model's, by the same phases; empty without a prediction.
    peak_bytes: the allocator's own figure where it has one, else the trace's; 0 where nothing was measured.
        predicted_peak_bytes: None without a prediction. capacity_bytes: what the device has for the allocator; 0 where
        not known.
    calibrated: whether the predicted times come from measurements of this machine.
    overhead: how many times as long the traced step took.
    lanes: when the device computes and copies in the step, as `measured` and as `predicted`, where anything is copied
        between host and device beside computing; measured ones are of the traced step.
    readings: what the driver reported while steps ran, a series each: utilization, memory, power, temperature, clocks.
    versions: of the libraries, by name. notes: sentences about how sure it is.
    """

    recipe: Annotated[Recipe, BeforeValidator(_resolved)]
    device: Device
    step_seconds: Amount
    tokens: Amount = 0.0
    measured: Trace | None = None
    predicted: Trace | None = None
    phase_seconds: Mapping[Phase, Amount] = field(default_factory=dict)
    predicted_seconds: Mapping[Phase, Amount] = field(default_factory=dict)
    peak_bytes: Bytes = 0
    predicted_peak_bytes: Bytes | None = None
    capacity_bytes: Bytes = 0
    calibrated: bool = False
    overhead: Amount = 1.0
    lanes: Mapping[str, tuple[Stretch, ...]] = field(default_factory=dict)
    readings: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def predicted_step_seconds(self) -> float:
        """Seconds of the predicted step; 0 without one."""
        return sum(self.predicted_seconds.values())

    @property
    def only_predicted(self) -> bool:
        """Whether nothing was measured."""
        return self.measured is None and self.predicted_step_seconds > 0

    @property
    def seconds(self) -> float:
        """Seconds of its step: measured, or predicted where nothing was."""
        return self.predicted_step_seconds if self.only_predicted else self.step_seconds

    @property
    def peak(self) -> int:
        """Bytes at its peak, likewise."""
        return (self.predicted_peak_bytes or 0) if self.only_predicted else self.peak_bytes

    @property
    def not_predicted(self) -> str:
        """The note that says why there is no prediction; empty where none does."""
        return next((note for note in self.notes if note.startswith(NOT_PREDICTED)), "")


@cache
def _adapter() -> TypeAdapter[Profile]:
    return TypeAdapter(Profile)


def save(profile: Profile, folder: Path) -> Path:
    """Write a profile into `folder`/profile, each file whole or not at all, and return that path.

    profile.json is written last and removed first: where it stands, the traces in its folder belong to it. Raises
    OSError.
    """
    home = folder / FOLDER
    home.mkdir(parents=True, exist_ok=True)
    (home / VALUES_FILE).unlink(missing_ok=True)
    kept = {name: trace for name in TRACES if (trace := getattr(profile, name)) is not None}
    for name in TRACES:
        path = home / f"{name}.json.gz"
        if name in kept:
            save_trace(kept[name], path)
        else:
            path.unlink(missing_ok=True)
    plain = _adapter().dump_python(replace(profile, measured=None, predicted=None), mode="json", exclude=set(TRACES))
    values = {"format": FORMAT, "version": VERSION, **plain, "traces": list(kept)}
    write_atomically(home / VALUES_FILE, json.dumps(values, indent=2, allow_nan=False) + "\n")
    return home


def home_of(folder: Path) -> Path | None:
    """The folder of the profile of a run's folder, or that folder itself; None where neither holds one."""
    return next((home for home in (folder / FOLDER, folder) if (home / VALUES_FILE).is_file()), None)


def how_to_profile(folder: Path) -> str:
    """Hint on how to make a profile where a folder holds none."""
    of_run = folder / RECIPE
    if not of_run.is_file():
        return "write a folder that `tightfit profile RECIPE` made, or `tightfit train RECIPE profile_step=10`"
    saved = of_run.read_text("utf-8", "replace")
    if GIVEN_MODULE in saved or GIVEN_ROWS in saved:
        return "its model or its rows are in your code: give Trainer profile_step=10 there, and another output_dir"
    return f"`tightfit profile {of_run} output_dir={folder}` writes one there"


def load(folder: Path) -> Profile:
    """The profile in a run's folder, or in that folder's `profile`.

    Raises ReportError for a folder that holds none, one that is damaged, or one of a newer version.
    """
    home = home_of(folder)
    if home is None:
        raise ReportError(f"{folder}: {_missing(folder)}; {how_to_profile(folder)}")
    path = home / VALUES_FILE
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
        named = [name for name in TRACES if name in values["traces"]]
        profile = _adapter().validate_python({**values, "measured": None, "predicted": None})
    except ValidationError as error:
        raise _damaged(path, wrong_fields(error)) from None
    except (KeyError, TypeError, OverflowError, RecipeError) as error:
        raise _damaged(path, error) from None
    traces = {name: load_trace(home / f"{name}.json.gz") for name in named}
    return replace(profile, measured=traces.get("measured"), predicted=traces.get("predicted"))


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no finite number")


def _missing(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "this is no folder"
    return "this folder holds no profile" + ("" if (folder / RECIPE).is_file() else f", and no {RECIPE} of a run")


def _damaged(path: Path, reason: object) -> ReportError:
    return ReportError(f"{path}: the profile is damaged ({reason}); profile again")

"""A profile: one recipe's training step, measured and predicted; and its folder.

    RUN_DIR/profile/profile.json.gz
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from tightfit.devices import Device
from tightfit.errors import ReportError
from tightfit.models import GIVEN_MODULE
from tightfit.profiling import FOLDER
from tightfit.recipe import Recipe
from tightfit.recipe.sections import GIVEN_ROWS
from tightfit.trace import Phase, Trace
from tightfit.trace.file import FileFormat
from tightfit.trace.lanes import Stretch
from tightfit.training.run_folder import RECIPE

NOT_PREDICTED = "not predicted: "
"""Beginning of the note that says why a step has no prediction."""
PROFILE = "profile.json.gz"
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

    recipe: Annotated[Recipe, BeforeValidator(_resolved), PlainSerializer(Recipe.to_dict)]
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


PROFILE_FILE = FileFormat("profile", 2, Profile)


def save(profile: Profile, folder: Path) -> Path:
    """Write a profile into `folder`/profile, whole or not at all, and return that path. Raises OSError."""
    home = folder / FOLDER
    home.mkdir(parents=True, exist_ok=True)
    PROFILE_FILE.save(profile, home / PROFILE)
    return home


def home_of(folder: Path) -> Path | None:
    """The folder of the profile of a run's folder, or that folder itself; None where neither holds one."""
    return next((home for home in (folder / FOLDER, folder) if (home / PROFILE).is_file()), None)


def how_to_profile(folder: Path) -> str:
    """Hint on how to make a profile where a folder holds none."""
    of_run = folder / RECIPE
    if not of_run.is_file():
        return "write a folder that `tightfit profile RECIPE` made, or `tightfit train RECIPE profile_step=10`"
    saved = of_run.read_text("utf-8", "replace")
    if GIVEN_MODULE in saved or GIVEN_ROWS in saved:
        return "its model or its rows are in your code: give Trainer profile_step=10 there, and another output_dir"
    return f"`tightfit profile {quote(str(of_run))} {quote(f'output_dir={folder}')}` writes one there"


def load(folder: Path) -> Profile:
    """The profile in a run's folder, or in that folder's `profile`.

    Raises ReportError for a folder that holds none, one that is damaged, or one of a newer version.
    """
    home = home_of(folder)
    if home is None:
        raise ReportError(f"{folder}: {_missing(folder)}; {how_to_profile(folder)}")
    return PROFILE_FILE.load(home / PROFILE)


def _missing(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "this is no folder"
    return "this folder holds no profile" + ("" if (folder / RECIPE).is_file() else f", and no {RECIPE} of a run")

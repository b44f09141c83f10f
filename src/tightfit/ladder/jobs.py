"""What a ladder asks of a process of its own, and what that answers, both as JSON in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from tightfit.ladder.rows import Machine, Predicted, Status
from tightfit.ladder.rungs import Launch

RecipeFields = dict[str, Any]
"""A recipe, as `Recipe.to_dict` writes it."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What is this machine, for this recipe?"""

    recipe: RecipeFields
    kind: Literal["about"] = "about"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Run a rung. within: the recipe whose memory a growing rung keeps to. memory: bytes that the GPU is cut down to.
    """

    recipe: RecipeFields
    runner: str
    launch: Launch
    within: RecipeFields | None
    memory: int | None
    warm_up: int
    steps: int
    kind: Literal["measure"] = "measure"


@dataclass(frozen=True, kw_only=True)
class Unpredicted:
    """A rung to predict. row: what is appended, its figures still to come. within: as of `Measure`."""

    row: Predicted
    recipe: RecipeFields
    within: RecipeFields | None


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Predict rungs, each appended to the file `results` as it is known.

    gpu: a name of the catalogue; None for this machine's own device. memory: bytes that this is cut down to.
    """

    rungs: tuple[Unpredicted, ...]
    gpu: str | None
    memory: int | None
    results: str
    kind: Literal["predict"] = "predict"


Job = About | Measure | Predict


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a rung took: the fields of `rows.Measured` that its process knows."""

    recipe: RecipeFields
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    samples: int
    tokens: int
    peak_allocated: int
    peak_reserved: int
    context: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a job. reason: a sentence, where it is not done. machine: of `About`. figures: of `Measure`."""

    status: Status = "done"
    reason: str = ""
    machine: Machine | None = None
    figures: Figures | None = None


JOB: TypeAdapter[Job] = TypeAdapter(Annotated[Job, Field(discriminator="kind")])
OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)
"""How each is written, and read."""

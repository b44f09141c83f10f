"""What a ladder is: one recipe, and rungs that each change a little of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tightfit.recipe import Recipe
from tightfit.recipe_text import apply_overrides, technique_to_yaml
from tightfit.techniques import Backend, Technique

Values = Mapping[str, Any]
"""A recipe's fields, as YAML has them."""

Scale = Literal["full", "reduced", "smallest"]
SCALES: tuple[Scale, ...] = get_args(Scale)
"""full: the shape that a GPU is for. reduced: minutes on two processor cores. smallest: seconds a rung."""
STEPS: dict[Scale, tuple[int, int]] = {"full": (3, 10), "reduced": (2, 5), "smallest": (1, 3)}
"""Steps of a rung before timing, and timed."""

PLAIN: dict[str, Any] = {
    "precision": "fp32", "checkpointing": "none", "optimizer": {"name": "adamw", "implementation": "foreach"},
    "attention": "eager", "compile": "off", "loading": {"workers": 0}, "lr_scheduler_type": "constant",
}  # fmt: skip
"""What a rung is without any technique."""

GROWTH = (1.5, 2, 3, 4, 6, 8, 12, 16)
"""How many times its batch a rung that grows is tried at."""

Launch = Literal["single", "dp", "ddp", "ddp-no-p2p"]
"""How a rung's processes start: one of its own; torch's DataParallel over two GPUs in one process; two processes under
torchrun with DistributedDataParallel; the same with the direct link between the GPUs switched off."""
DEVICES = 2
"""How many devices a rung has that is not on a single one."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """What somebody else measured. memory_mib: by the account that the ladder names."""

    seconds: float | None = None
    samples_per_second: float | None = None
    memory_mib: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One recipe of a ladder.

    changes: the fields in which it differs from the ladder's base. published: figures to stand beside it.
    against: the rung that its effect is told by; None for the ladder's first.
    feature: what it shows, by the name that the table of features has for it.
    grows: whether its batch is raised to the largest that needs no more memory than `against` is predicted to.
    note: a sentence on what differs from what was published.
    """

    name: str
    changes: Values = field(default_factory=dict)
    published: Published | None = None
    against: str | None = None
    feature: str | None = None
    launch: Launch = "single"
    grows: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """A recipe's rungs.

    base: the fields that all rungs share, at full size; shrunk: what replaces them at the smaller scales.
    published_on: the card and the source of the published figures; gpu: that card, by the catalogue's name, or one like
    it where `card_named` says that they name none.
    steps_published: optimizer steps that the published seconds are of. published_memory: whose account the published
    memory is, the driver's of the process or the allocator's own.
    notes: sentences for the heading.
    """

    name: str
    title: str
    base: Values
    rungs: tuple[Rung, ...]
    shrunk: Mapping[Scale, Values] = field(default_factory=dict)
    published_on: str = ""
    gpu: str | None = None
    card_named: bool = True
    steps_published: int | None = None
    published_memory: Literal["driver", "allocator"] = "driver"
    notes: tuple[str, ...] = ()

    @property
    def backend(self) -> Backend:
        """The backend that all rungs share."""
        return Recipe.from_dict({"backend": self.base.get("backend", "pytorch")}).backend

    def rung(self, name: str) -> Rung:
        """The rung of that name. Raises KeyError."""
        return {rung.name: rung for rung in self.rungs}[name]

    def recipe(self, rung: Rung, scale: Scale = "full", overrides: Iterable[str] = ()) -> Recipe:
        """The rung's recipe at a scale. overrides: `key=value` texts that stand above all. Raises RecipeError."""
        return Recipe.from_dict(apply_overrides(self.values(rung, scale), overrides))

    def values(self, rung: Rung, scale: Scale) -> dict[str, Any]:
        values = {**self.base, **rung.changes}
        smaller = dict(self.shrunk.get(scale, {}))
        for name in set(smaller) & set(rung.changes):
            # what a rung sets itself, it keeps: a batch of a smaller ladder is what the rung is about
            del smaller[name]
        precision = values.get("precision")
        if scale != "full" and isinstance(precision, dict) and "tf32" in precision:
            values["precision"] = {**precision, "tf32": False}  # smaller scales are for processors, which have none
        return {**values, **smaller}


def setting_name(setting: Technique) -> str:
    """A technique with its knobs that are not the default, such as `every-nth, n=3`."""
    written = technique_to_yaml(setting)
    knobs = {} if isinstance(written, str) else {key: value for key, value in written.items() if key != "name"}
    return ", ".join([setting.name, *(f"{knob}={value}" for knob, value in knobs.items())])


def setting_alone(setting: Technique) -> dict[str, Any]:
    """The changes that make a technique alone, with what it cannot be without."""
    return {setting.slot: technique_to_yaml(setting), **setting.needs}

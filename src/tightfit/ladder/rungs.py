"""A ladder: one base recipe, rungs that each change a little of it, and the cards that it is of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from tightfit.devices import listed_device
from tightfit.planning.targets import Target, gpu_target
from tightfit.recipe import CHOSEN_SLOTS, Recipe
from tightfit.recipe.yaml import apply_overrides, technique_to_yaml
from tightfit.techniques import SLOTS, Backend, Technique

Scale = Literal["full", "reduced", "smallest"]
SCALES: tuple[Scale, ...] = get_args(Scale)
"""full: the shape that a GPU is for. reduced: minutes on two processor cores. smallest: seconds a rung."""
STEPS_OF_SCALE: dict[Scale, tuple[int, int]] = {"full": (3, 10), "reduced": (2, 5), "smallest": (1, 3)}
"""Steps of a rung before timing, and timed."""

PLAIN_FIELDS: dict[str, Any] = {
    **{slot: SLOTS[slot][0].name for slot in CHOSEN_SLOTS},
    "precision": "fp32", "checkpointing": "none", "optimizer": {"name": "adamw", "implementation": "foreach"},
    "attention": "eager", "compile": "off", "loading": {"workers": 0}, "lr_scheduler_type": "constant",
}  # fmt: skip
"""A rung's fields without any technique: a slot's first variant, where nothing else is said."""

Launch = Literal["single", "dp", "ddp", "ddp-no-p2p"]
"""Ways in which a rung's processes start: one of its own; torch's DataParallel over two GPUs in one process; two
processes under torchrun with DistributedDataParallel; the same with the direct link between the GPUs switched off."""
DEVICES = 2
"""Devices of a rung that is not on a single one."""
ON_GPUS: Mapping[Launch, str] = {"dp": "DataParallel splits a batch over two GPUs",
                                 "ddp-no-p2p": "NCCL switches off the direct link between two GPUs"}
"""The launches that need as many GPUs, and why."""


def launch_refusals(launch: Launch, gpus: int) -> list[str]:
    """Reasons why a machine with so many GPUs cannot start a rung's processes."""
    return ([f"launch: {ON_GPUS[launch]}, and this machine has {gpus}; run it where there are two"]
            if launch in ON_GPUS and gpus < DEVICES else [])


class Figures(NamedTuple):
    """Seconds of a step, and bytes; None where they are not known."""

    seconds: float | None = None
    memory: float | None = None


UNKNOWN = Figures()


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One recipe of a ladder.

    changes: the fields in which it differs from the ladder's base.
    published: by somebody else; memory by the account that the ladder names.
    against: the rung that is the baseline of its factors; None for the ladder's first.
    feature: the technique that it shows, by the name of its row in guides.yaml.
    grows: whether its batch is raised to the largest that needs no more memory than `against` is predicted to.
    note: a sentence on what differs from what was published.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    published: Figures = UNKNOWN
    against: str | None = None
    feature: str | None = None
    launch: Launch = "single"
    grows: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """A base recipe and its rungs.

    base: the fields that all rungs share, at full size; shrunk: their replacements at the smaller scales.
    published_on: the card and the source of the published figures; gpu: that card, by the catalogue's name, or one like
    it where `card_named` says that they name none.
    published_memory: whose account the published memory is, the driver's of the process or the allocator's own.
    in_jax: the ladder that stands for this one under `backend=jax`. notes: sentences for the heading.
    """

    name: str
    title: str
    base: Mapping[str, Any]
    rungs: tuple[Rung, ...]
    shrunk: Mapping[Scale, Mapping[str, Any]] = field(default_factory=dict)
    published_on: str = ""
    gpu: str | None = None
    card_named: bool = True
    published_memory: Literal["driver", "allocator"] = "driver"
    in_jax: str = ""
    notes: tuple[str, ...] = ()

    @property
    def backend(self) -> Backend:
        """The backend that all rungs share."""
        return Recipe.from_dict({"backend": self.base.get("backend", "pytorch")}).backend

    @property
    def published_card(self) -> str:
        """The catalogue's name of the card that it was published on; the published words where they name none."""
        return card_name(self.gpu) if self.gpu is not None and self.card_named else self.published_on

    def rung(self, name: str) -> Rung:
        """The rung of that name. Raises KeyError."""
        return {rung.name: rung for rung in self.rungs}[name]

    def recipe(self, rung: Rung, scale: Scale = "full", overrides: Iterable[str] = ()) -> Recipe:
        """The rung's recipe at a scale. overrides: `key=value` texts that stand above all. Raises RecipeError."""
        # a field that a rung changes, it keeps: a batch of a smaller ladder is what the rung is about
        smaller = {name: value for name, value in self.shrunk.get(scale, {}).items() if name not in rung.changes}
        values = {**self.base, **rung.changes, **smaller}
        precision = values.get("precision")
        if scale != "full" and isinstance(precision, dict) and "tf32" in precision:
            values["precision"] = {**precision, "tf32": False}  # smaller scales are for processors, which have none
        return Recipe.from_dict(apply_overrides(values, overrides))


def setting_name(setting: Technique) -> str:
    """A technique with its knobs that are not the default, such as `every-nth, n=3`."""
    written = technique_to_yaml(setting)
    knobs = {} if isinstance(written, str) else {key: value for key, value in written.items() if key != "name"}
    return ", ".join([setting.name, *(f"{knob}={value}" for knob, value in knobs.items())])


def setting_alone(setting: Technique) -> dict[str, Any]:
    """The changes that apply one technique alone, with what it needs besides."""
    return {setting.slot: technique_to_yaml(setting), **setting.needs}


def card(gpu: str) -> Target:
    """A card, which is not this machine's own, as `gpu_target` reads it."""
    return gpu_target(gpu, None, lambda: None)


def card_name(device: str) -> str:
    """The catalogue's name of a device, however that is written; the device's own where the catalogue has none."""
    card = listed_device(device)
    return device if card is None else card.name

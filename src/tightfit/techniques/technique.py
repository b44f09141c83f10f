"""Declarations of techniques: frozen dataclasses that the recipe, the backends, the docs and the tests all read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, cast, dataclass_transform

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as _pydantic_dataclass

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe

Exactness = Literal["bitwise", "rounding", "changes"]
"""Exactness of the gradients: the same bits, the same up to rounding, or changed by design."""

T = TypeVar("T")


def _not_boolean(value: Any) -> Any:
    if isinstance(value, bool):  # which Python takes for 0 or 1
        raise ValueError("a number")
    return value


def at_most(limit: int) -> AfterValidator:
    """A validator that refuses integers above `limit`."""

    def check(value: int) -> int:
        if value > limit:
            raise ValueError(f"at most {limit}")
        return value

    return AfterValidator(check)


NUMBER = BeforeValidator(_not_boolean)
"""Validator beside the limits of every number: `true` and `false` are none."""

Positive = Annotated[int, Field(ge=1), at_most(2**40), NUMBER]
LARGEST = 1e18
"""Limit of numbers that updates multiply: times a learning rate one still fits fp32, which torch checks in a step."""
NonNegative = Annotated[float, Field(ge=0.0, le=LARGEST, allow_inf_nan=False), NUMBER]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


class Technique:
    """One choice a recipe makes in one slot. Subclasses are frozen dataclasses whose fields are the knobs."""

    slot: ClassVar[str]
    """The recipe field this technique fills."""
    name: ClassVar[str]
    """Value of that field; the slot's own name where it has one variant that needs none."""
    may_be_auto: ClassVar[bool] = True
    """Whether a slot's field may say `auto`."""
    unserved: ClassVar[Mapping[str, str]] = {}
    """Of a slot: names that people look for and no variant has, each with the reason and what to write instead."""
    exact: ClassVar[Exactness] = "bitwise"
    tolerance: ClassVar[float] = 0.0
    """For `changes`: how far above fp32 AdamW's the held-out loss may end in `benchmarks/convergence.py`, in nats."""
    speed: ClassVar[str] = ""
    """Effect on speed, in a few words, for the docs."""
    memory: ClassVar[str] = ""
    """Effect on memory, in a few words, for the docs."""
    needs: ClassVar[Mapping[str, str]] = {}
    """Other fields' values that it cannot be without, as a person writes them."""
    numerics_change: ClassVar[int] = 0
    """How far it changes results: 0 not at all, or as every training does (mixed precision); 1 states of 8 or 16 bits;
    2 weights of 16 bits, or products of 8; 3 states of 4 bits; 4 other steps, or another learning rate. `auto`
    takes the mildest that serves."""
    auto_on: ClassVar[tuple[str, ...]] = ("pytorch", "jax")
    """The backends on which `auto` considers it; none for what only those take who name it."""
    trains_only: ClassVar[bool] = False
    """Whether its slot means nothing where nothing is learned."""
    changes_states: ClassVar[bool] = False
    """Whether it decides what weights, gradients and optimizer states hold."""
    activation_share: ClassVar[float] = 1.0
    """Share of a slot's heaviest variant's bytes that a sample adds to the peak, as a rule of thumb."""
    slowdown_share: ClassVar[Mapping[str, float]] = {}
    """Share of a step's time that it adds to its slot's plainest variant's, by kind of device, as a rule of thumb."""
    dominated_by: ClassVar[Mapping[str, str]] = {}
    """The variant of its slot, by name, that takes no more memory and is no slower, by kind of device."""
    trace_cost: ClassVar[int] = 1
    """How many times as long a prediction takes with it."""
    startup_seconds: ClassVar[float] = 0.0
    """Seconds before the first step, such as a compiler's."""
    worth_trying: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    """Knobs of each of its settings that are worth trying."""
    hf_unless: ClassVar[str | None] = None
    """The one of Hugging Face's TrainingArguments that says something else, where it is meant without it; empty where
    it is always meant."""

    @property
    def thriftier_knobs(self) -> list[tuple[dict[str, Any], str]]:
        """Its knobs with other values that use less memory, and what that saves, in words; each more than before."""
        return []

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        """Reasons, as sentences, why this technique cannot serve `recipe` on `device`; none if it can."""
        yield from ()

    def notes(self, recipe: Recipe, device: Device) -> tuple[str, ...]:
        """Sentences for a run of a resolved recipe on a device, or for its plan."""
        return ()

    def hf_arguments(self, on_cpu: bool) -> dict[str, Any] | None:
        """Hugging Face's TrainingArguments that say this, without those that are so by default; None where none can.

        on_cpu: whether the Trainer is told to use the processor.
        """
        return None if self.hf_unless is None else {}

    @classmethod
    def from_hf_arguments(cls, a: Mapping[str, Any]) -> dict[str, Any] | None:
        """The knobs that complete TrainingArguments give this variant; None where they mean another one.

        Raises RecipeError naming an argument whose value no knob has.
        """
        return None if cls.hf_unless is None or a.get(cls.hf_unless) else {}

    @classmethod
    def representative_settings(cls) -> list[Self]:
        """The settings worth trying: what the ladder and the contract tests run over."""
        return [cls(**knobs) for knobs in cls.worth_trying]

    @classmethod
    def default_setting(cls, recipe: Recipe, device: Device) -> Self | None:
        """The setting that `auto` stands for where nothing is searched, if it is this variant's; a slot whose variants
        name none stands for its first."""
        return None

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        """The settings that `auto` considers on a device, for a recipe as written."""
        return cls.representative_settings() if recipe.backend.name in cls.auto_on else []

    def left_open(self, device: Device) -> bool:
        """Whether a search may take another variant of its slot on a device, though a recipe names this one."""
        return False

    def opened(self) -> Self | Literal["auto"]:
        """The value of its slot where a search may choose and results are to stay as they are."""
        return self if self.numerics_change else "auto"

    def resolved(self) -> Self:
        """This technique with no knob left `auto` that a search decides."""
        return self

    def slowdown(self, device: Device) -> float:
        """`slowdown_share` on that device."""
        return self.slowdown_share.get(device.kind, 0.0)

    @property
    def kept_share(self) -> float:
        """`activation_share` with these knobs."""
        return self.activation_share

    @property
    def preferred(self) -> Self | None:
        """The setting with other knobs that is never slower, so that this one is for where that does not fit."""
        return None

    def bytes_per_parameter(self, recipe: Recipe) -> float:
        """Bytes of weights, gradients and optimizer states that it makes a step of a resolved recipe hold for each
        parameter, as a rule of thumb; below zero for what it moves elsewhere."""
        return 0.0

    def redundant(self, recipe: Recipe, written: Recipe) -> bool:
        """Whether a search need not look at it beside the other techniques of a resolved recipe. written: the same
        before anything was resolved."""
        return False

    def saving(self, recipe: Recipe) -> str:
        """Memory that writing it saves, in words, against the variant of its slot that a recipe pins; empty where
        that is nothing, or where something else is the better advice."""
        return ""


def refuse_between_blocks(recipe: Recipe, written: str, plain: str) -> Iterator[str]:
    """Reasons why what works between a model's blocks cannot serve a recipe.

    written: the field as it stands in the recipe, such as `offload=host`. plain: what to write instead.
    """
    compiled = recipe.compile
    if compiled != "auto" and compiled.one_region:
        yield (f"{written} works between a model's blocks, and compile={compiled.name} makes one region of "
               f"them; write compile=per-block, or {plain}")
    elif compiled != "auto" and compiled.records_graphs:
        yield (f"{written} moves what blocks work on, and CUDA graphs record addresses; write "
               f"compile=per-block with its usual backend and mode, or {plain}")
    if not recipe.parallel.one_device:
        yield f"{written} serves one model; write {plain} beside parallel={recipe.parallel.name}"


@dataclass_transform(kw_only_default=True, frozen_default=True)
def technique(cls: type[T]) -> type[T]:
    """Make a class a technique: frozen, keyword-only, validated, its knobs' docstrings kept at run time."""
    config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    made = _pydantic_dataclass(frozen=True, kw_only=True, config=config)(cls)
    for name, knob in vars(made)["__pydantic_fields__"].items():
        if knob.description is None:  # pydantic reads the docstrings of a class's own knobs only
            inherited = (vars(base).get("__pydantic_fields__", {}).get(name) for base in made.__mro__[1:])
            knob.description = next((k.description for k in inherited if k is not None and k.description), None)
    return cast(type[T], made)

"""Offloading: what waits in the host's memory while the device does not need it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from tightfit.techniques.technique import NUMBER, Technique, refuse_between_blocks, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe

STREAMED: Mapping[str, str] = {"offload": "host", "accumulation": "by-block", "update": "with-forward"}
"""The fields of a recipe whose blocks wait in the host's memory: what takes least of the device's."""


MOST_COPIED = 0.45
"""`kept_share` of the checkpointing above which a search does not look at activations in host memory: without
checkpointing steps of qwen2.5-1.5b, 16 x 4,096 tokens on an RTX 4090, are predicted to take 2.4 times as long, for
their copies."""


@dataclass(frozen=True, kw_only=True)
class HostShares:
    """The shares of the blocks whose tensors wait in host memory, from 0 to 1. embeddings: whether those of the input
    embedding and the head do as well."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    embeddings: bool = False

    @property
    def keeps_weights(self) -> bool:
        """Whether weights do."""
        return self.weights > 0 or self.embeddings

    @property
    def needs_by_block(self) -> bool:
        """Whether micro-batches have to go through the blocks together."""
        return self.keeps_weights or self.gradients > 0

    @property
    def uses_host(self) -> bool:
        """Whether anything does."""
        return self != HostShares()


class Offload(Technique):
    slot: ClassVar[str] = "offload"
    trains_only: ClassVar[bool] = True
    changes_states: ClassVar[bool] = True
    reach: ClassVar[int] = 1
    """Blocks in front of a block and behind it that its own work has to do with."""

    @property
    def shares(self) -> HostShares:
        """The shares that wait in the host's memory; `auto` is all of the blocks."""
        return HostShares()

    @property
    def open_shares(self) -> tuple[str, ...]:
        """The shares that are left to a search."""
        return ()

    def with_shares(self, shares: Mapping[str, float]) -> Self:
        """This with other shares, by name."""
        return self


@technique
class NoOffload(Offload):
    """Keep weights, gradients, optimizer states and activations on the device."""

    name: ClassVar[str] = "none"
    speed: ClassVar[str] = "the baseline"
    memory: ClassVar[str] = "the baseline"
    hf_unless: ClassVar = ""


Share = Literal["auto"] | Annotated[float, Field(ge=0, le=1), NUMBER]
"""A share of a model's blocks, from 0 to 1; `auto` for as many as the device has no room for."""


@technique
class Host(Offload):
    """Keep blocks' weights, gradients, optimizer states and activations in the host's memory, and bring each block's to
    the device while it is used, the next block's meanwhile. The arithmetic is the device's: results stay what they
    are. Beside frozen weights it is these that are kept there, and only ever copied to the device; gradients and states
    are those of what is trained."""

    name: ClassVar[str] = "host"
    speed: ClassVar[str] = "the same where a global batch computes for as long as its copies take, slower below"
    memory: ClassVar[str] = "two blocks' instead of all blocks'; as much in the host's memory as leaves the device's"

    auto_on: ClassVar = ("pytorch",)
    slowdown_share: ClassVar = {"cuda": 0.05}
    trace_cost: ClassVar[int] = 2
    reach: ClassVar[int] = 2  # the next one is fetched into the place of the one before

    weights: Share = 1.0
    """Share of the blocks, to the nearest whole number of them, whose weights wait in host memory; needs
    accumulation=by-block."""
    gradients: Share = 1.0
    """Share of the blocks whose gradients do."""
    optimizer: Share = 1.0
    """Share of the blocks whose optimizer states do; with all of them, the states of the rest of the model as well."""
    activations: Share = 0.0
    """Share of the blocks whose tensors kept for the backward pass do: what checkpointing leaves of them."""
    embeddings: bool = False
    """Whether weights and gradients of the input embedding and the head do as well: for the smallest cards; their
    copies are waited for."""

    @property
    def shares(self) -> HostShares:
        shares: dict[str, Any] = {name: 1.0 if share == "auto" else share for name, share in vars(self).items()}
        return HostShares(**shares)

    @property
    def open_shares(self) -> tuple[str, ...]:
        """The shares that say `auto`."""
        return tuple(name for name, share in vars(self).items() if share == "auto")

    def resolved(self) -> Self:
        return self.with_shares(dict.fromkeys(self.open_shares, 1.0))

    def with_shares(self, shares: Mapping[str, float]) -> Self:
        changed: dict[str, Any] = {**shares}
        return replace(self, **changed)

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        """The optimizer's states alone, which are read once a step, and of which there are few beside frozen weights;
        all of the blocks; and what the model has outside of them as well."""
        if device.kind != "cuda" or recipe.backend.name not in cls.auto_on:
            return []
        states = [] if recipe.trainable.freezes else [cls(weights=0, gradients=0)]
        return [*states, cls(activations=1), cls(activations=1, embeddings=True)]

    def slowdown(self, device: Device) -> float:
        shares: list[float] = list(vars(self.shares).values())
        return sum(share > 0 for share in shares) * super().slowdown(device)

    def redundant(self, recipe: Recipe, written: Recipe) -> bool:
        """Whether activations wait as well though checkpointing leaves so many of them that their copies take longer
        than a block computes."""
        chosen = recipe.checkpointing
        keeps_much = chosen != "auto" and chosen.kept_share > MOST_COPIED
        return bool(self.shares.activations) and keeps_much and written.checkpointing == "auto"

    @property
    def kept_share(self) -> float:
        return 1 - 0.8 * self.shares.activations

    @property
    def preferred(self) -> Self | None:
        return replace(self, embeddings=False) if self.embeddings else None

    @property
    def thriftier_knobs(self) -> list[tuple[dict[str, Any], str]]:
        shares, of_blocks = self.shares, ("weights", "gradients", "optimizer")
        kept: dict[str, Any] = {"activations": 1} if shares.activations < 1 else {}
        blocks = {name: 1 for name in of_blocks if getattr(shares, name) < 1}
        ends = {} if shares.embeddings else {**kept, **blocks, "embeddings": True}
        more = ((kept, "what blocks keep for the backward pass waits in host memory as well"),
                (blocks, "all blocks' weights, gradients and optimizer states wait in host memory"),
                (ends, "embedding and head wait in host memory as well"))
        return [(knobs, why) for knobs, why in more if knobs]

    def bytes_per_parameter(self, recipe: Recipe) -> float:
        held = 0.0 if recipe.precision == "auto" else recipe.precision.weight_bytes
        states = 0.0 if recipe.optimizer == "auto" else recipe.optimizer.bytes_per_parameter(recipe)
        shares = self.shares
        return -(shares.weights + shares.gradients) * held - shares.optimizer * states

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from refuse_between_blocks(recipe, "offload=host", "offload=none")
        if device.kind == "cpu":
            yield ("offload=host moves tensors out of a GPU's memory into the processor's, where they are "
                   "already; write offload=none, or device=cuda")
        by_block = recipe.accumulation == "auto" or recipe.accumulation.by_block
        if self.shares.needs_by_block and not by_block:
            yield ("offload=host fetches weights and gradients once for all micro-batches; write "
                   "accumulation=by-block, or offload: {name: host, weights: 0, gradients: 0}")

"""Accumulation: the order in which a step takes the micro-batches of a global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from tightfit.techniques.technique import Exactness, Positive, Technique, refuse_between_blocks, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe


MOST_IN_SWEEP = 16
"""Micro-batches that go through the blocks together where nothing is said, at most: predictions trace each of them, and
what they keep for the backward pass lies in memory at once."""
USUAL_SWEEP = 4
"""Micro-batches of a sweep where a global batch has more than that."""
LONG_SWEEP = 1 << 17
"""Tokens of a sweep from which on what it computes takes far longer than the copies of blocks that it waits for, as
reckoned from cards' data sheets, not yet measured on a GPU; more micro-batches would cost memory."""


class Accumulation(Technique):
    slot: ClassVar[str] = "accumulation"
    auto_on: ClassVar = ()  # it follows from the rest
    trains_only: ClassVar[bool] = True
    exact: ClassVar[Exactness] = "rounding"
    by_block: ClassVar[bool] = False
    """Whether micro-batches wait for one another at every block."""

    @property
    def in_one_sweep(self) -> bool:
        """Whether all micro-batches go through the blocks together, however many they are."""
        return False

    def sweep_of(self, micro_batches: int) -> int:
        """Number of a global batch's micro-batches that go through the blocks together."""
        return 1


@technique
class Loop(Accumulation):
    """One micro-batch after the other. A framework that compiles whole steps compiles each of them again."""

    name: ClassVar[str] = "loop"
    speed: ClassVar[str] = "the baseline; where whole steps are compiled, compile time grows with the micro-batches"
    memory: ClassVar[str] = "the baseline: one micro-batch's activations, and the summed gradients"


@technique
class ByBlock(Accumulation):
    """All micro-batches through a block before the next block, forward and backward. What waits in host memory is
    fetched once for all of them, and a block's gradient is final when its backward passes end."""

    name: ClassVar[str] = "by-block"
    speed: ClassVar[str] = "as a loop; with offload, as many times less traffic as micro-batches go together"
    memory: ClassVar[str] = "what every micro-batch of a sweep keeps for its backward pass, instead of one's"
    by_block: ClassVar[bool] = True
    worth_trying: ClassVar = ({}, {"sweep": 2})

    sweep: Literal["auto"] | Positive = "auto"
    """Micro-batches that go through the blocks together; `auto` for all of a global batch's."""
    gradient_sums: Literal["weights", "fp32"] = "weights"
    """The format in which a block's gradients of a sweep's micro-batches are summed: that of its weights, or fp32,
    rounded once to theirs."""

    @property
    def in_one_sweep(self) -> bool:
        return self.sweep == "auto"

    def sweep_of(self, micro_batches: int) -> int:
        return micro_batches if self.sweep == "auto" else min(self.sweep, micro_batches)

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        # Where something needs it, that says the same of itself: a loop would not do.
        if not _is_needed(recipe):
            yield from refuse_between_blocks(recipe, "accumulation=by-block", "accumulation=loop")
        if self.gradient_sums == "fp32" and self.sweep == 1:
            yield ("gradient_sums=fp32 sums the micro-batches that go through a block together, and with "
                   "sweep=1 that is one; write accumulation.sweep=auto")
        if recipe.checkpointing != "auto" and recipe.checkpointing.spans_blocks:
            yield (f"checkpointing={recipe.checkpointing.name} recomputes several blocks together, and "
                   "accumulation=by-block stops between them; write checkpointing=every-block")

    @classmethod
    def default_setting(cls, recipe: Recipe, device: Device) -> Self | None:
        if not _is_needed(recipe):
            return None
        if recipe.micro_batch_size == "auto":
            return cls()
        count, tokens = -(-recipe.batch_size // recipe.micro_batch_size), recipe.micro_batch_size * recipe.seq_len
        enough = -(-LONG_SWEEP // tokens)
        if enough <= USUAL_SWEEP:
            return cls(sweep=enough if count > enough else "auto")
        return cls(sweep=USUAL_SWEEP if count > MOST_IN_SWEEP else "auto")


def _is_needed(recipe: Recipe) -> bool:
    """Whether an offload or an update named by the recipe works block by block alone."""
    return recipe.offloaded.needs_by_block or (recipe.update != "auto" and recipe.update.needs_by_block)


@technique
class Scan(Accumulation):
    """One micro-batch, compiled once, in a loop that sums the gradients."""

    name: ClassVar[str] = "scan"
    speed: ClassVar[str] = "as a loop; compile time does not grow with the micro-batches"
    memory: ClassVar[str] = "as a loop"

    @classmethod
    def default_setting(cls, recipe: Recipe, device: Device) -> Self | None:
        return cls() if recipe.backend.compiles_whole_steps else None

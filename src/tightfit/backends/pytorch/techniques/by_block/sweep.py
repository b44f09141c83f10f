"""Block-by-block gradient accumulation: every micro-batch of a sweep passes a block before the next block.

What a block needs, such as its weights from host memory, is fetched once for all of them, and its gradient is final
when its backward passes end: vertical scheduling (GreedySnake, Wang et al. 2025, arXiv 2512.17570).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tightfit.backends.pytorch.batch import TensorGlobalBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.by_block.block_calls import BlockCalls
from tightfit.backends.pytorch.techniques.by_block.parts import WITHOUT_BLOCKS
from tightfit.backends.pytorch.techniques.by_block.suspended_pass import SuspendedPass
from tightfit.errors import ModelError
from tightfit.trace import Phase

if TYPE_CHECKING:
    from tightfit.backends.pytorch.step import Step


class ByBlock:
    """Gradient accumulation block after block, over several micro-batches at a time.

    sweep_of: how many of so many micro-batches go together. fp32_sums: sum a part's gradients of a sweep in fp32.
    """

    def __init__(self, sweep_of: Callable[[int], int], fp32_sums: bool = False) -> None:
        self.sweep_of, self._fp32_sums = sweep_of, fp32_sums

    def __call__(self, build: Build, passes: Step, global_batch: TensorGlobalBatch) -> Tensor:
        count = len(global_batch.micro_batches)
        size = self.sweep_of(count)
        losses: list[Tensor] = []
        for start in range(0, count, size):
            stop = min(start + size, count)
            try:
                losses += _Sweep(build, passes, global_batch, range(start, stop), self._fp32_sums).run()
            except RuntimeError as error:
                if "graph a second time" not in str(error):
                    raise
                raise ModelError("accumulation: the model uses one tensor from outside of its blocks in several "
                                 "places, such as the embeddings' output again at its end, and by-block runs what "
                                 f"made it backward once; write {WITHOUT_BLOCKS}") from None
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total


class _Sweep:
    def __init__(
        self, build: Build, passes: Step, global_batch: TensorGlobalBatch, members: range, fp32_sums: bool
    ) -> None:
        self._build, self._passes, self._global_batch = build, passes, global_batch
        self._later, self._last = members.start > 0, members.stop == len(global_batch.micro_batches)
        blocks = passes.blocks
        assert blocks is not None
        self._blocks: BlockCalls = blocks
        self._update = blocks.update
        learns = [bool(parameters) for parameters in blocks.parts.parameters].__getitem__
        self._members = {number: SuspendedPass(partial(passes.forward, global_batch, number), learns)
                         for number in members}
        self._order: list[int] = []
        self._fp32_sums = fp32_sums and len(members) > 1
        self._sums: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self._first_call = 0 if blocks.activations is None else blocks.activations.calls

    def run(self) -> list[Tensor]:
        """The summed loss of each member."""
        try:
            self._forward()
            self._backward()
        except BaseException:
            for member in self._members.values():
                with self._build.forward_context():
                    member.close()
            raise
        return [member.loss for member in self._members.values() if member.loss is not None]

    def _forward(self) -> None:
        for number in self._members:
            self._advance(number)
        self._blocks.end_embeddings()
        while waiting := [member.at for member in self._members.values() if member.at is not None]:
            block = waiting[0]
            if {*waiting} != {block} or len(waiting) < len(self._members):
                raise ModelError("accumulation: the micro-batches call the model's blocks in different orders, and "
                                 f"cannot go through them together; write {WITHOUT_BLOCKS}")
            self._order.append(block)
            self._blocks.begin(block, self._blocks.parts.next_block(block))
            for number in self._members:
                self._advance(number)
            torch.clear_autocast_cache()  # casts of this block's weights, which no later block needs
            self._blocks.end(block)
            if all(member.at is None for member in self._members.values()):
                self._store_gradients_of_head()
            self._blocks.end_embeddings()

    def _store_gradients_of_head(self) -> None:
        """The head's backward passes are over, and its weights still there; those of a tied embedding are to come."""
        head, embedding = self._blocks.parts.head, self._blocks.parts.embedding
        if head is not None:
            self._store_gradients(head, self._last and head != embedding)

    def _advance(self, number: int) -> None:
        """Go on with a forward pass; at its end comes the backward pass of what follows the last block."""
        member = self._members[number]
        self._passes.select(number)
        # Entered for each stretch: the pass itself enters the same, and would leave it to others when it is suspended.
        with self._build.forward_context(), self._blocks.called_by(member.call):
            member.advance()
        if member.loss is not None:
            self._passes.backward(self._global_batch, number)
            if self._blocks.parts.head is not None:
                self._add_up(self._blocks.parts.head)
            if number != [*self._members][-1]:
                self._passes.enter(Phase.FORWARD, "the forward passes, block by block")

    def _backward(self) -> None:
        last_calls = {block: call for call, block in enumerate(self._order)}
        first_calls = {block: call for call, block in reversed([*enumerate(self._order)])}
        calls = [call for call in reversed(range(len(self._order)))
                 if any(member.learns_from(call) for member in self._members.values())]
        activations = self._blocks.activations
        if activations is not None and calls:
            count = len(self._members)
            activations.expect([self._first_call + call * count + member for call in calls for member in range(count)])
        for call, then in zip(calls, [*calls, None][1:], strict=True):
            block, before = self._order[call], None if then is None else self._order[then]
            self._blocks.begin(block, before)
            # Other blocks' come between the calls of one that is called again: its own are added to when it is stored.
            if self._later and last_calls[block] == first_calls[block]:
                self._update.fetch_gradients(block, before)
            for number, member in self._members.items():
                self._passes.select(number)
                member.backward(call)
                self._add_up(block)
            if first_calls[block] == call:
                self._store_gradients(block, self._last)
            self._blocks.end(block)
        self._backward_outside()

    def _backward_outside(self) -> None:
        """The backward pass of what comes before the blocks: the embedding's weights are there beside its gradient."""
        parts = self._blocks.parts
        embedding = parts.embedding if parts.embedding is not None and parts.parameters[parts.embedding] else None
        if embedding is not None:
            self._blocks.begin(embedding)
            self._update.fetch_gradients(embedding, None)
        for member in self._members.values():
            member.backward_outside()
            if embedding is not None:
                self._add_up(embedding)
        if embedding is not None:
            self._store_gradients(embedding, self._last)
        self._blocks.end_embeddings()

    def _add_up(self, part: int) -> None:
        """Add a part's gradients to its sums in fp32, where there are such."""
        for parameter in self._blocks.parts.parameters[part] if self._fp32_sums else ():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and parameter in self._sums:
                self._sums[parameter][1].add_(gradient)
            elif gradient is not None:
                self._sums[parameter] = gradient, gradient.float()

    def _store_gradients(self, part: int, final: bool) -> None:
        """Hand a part's summed gradients over; sums in fp32 are rounded into the memory of the first gradients."""
        for parameter in self._blocks.parts.parameters[part] if self._fp32_sums else ():
            if parameter in self._sums:
                parameter.grad, summed = self._sums.pop(parameter)
                parameter.grad.copy_(summed)
        self._update.store_gradients(part, final)

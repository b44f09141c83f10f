"""Results that a selective policy keeps, followed while a region's forward pass runs.

A kept result that is changed in place would reach the recomputation with the change made, and be changed once more.
Such a result is kept no longer: it is recomputed, as one that the policy does not name. A change after the region's
forward pass comes too late for that; torch's own check tells of it.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

Contexts = tuple[Any, Any]
SAME_MEMORY = torch.ops.aten._unsafe_view.default
"""The op whose result lies in its argument's memory and yet counts its changes apart, as its name warns: the last one
of a matmul without a bias."""


def contexts_of_kept(policy: Any) -> Contexts:
    """The contexts of a region's forward pass and of its recomputation, under a selective policy."""
    followed = _Followed(policy)
    contexts: Contexts = torch_checkpoint.create_selective_checkpoint_contexts(followed)
    followed.results = contexts[0].storage
    return contexts


class _Followed:
    """A policy, and which memory holds what it keeps. A call is an op and how many calls of it came before."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.results: dict[Any, Any] = {}
        """torch's record of kept results by op: by the number of the call, before torch 2.13 a list of them alone."""
        self.calls: Counter[Any] = Counter()
        self.kept: set[tuple[Any, int]] = set()
        self.last: tuple[Any, int] | None = None
        """The call kept last, where its memory is not known yet: torch may ask before the op has run."""
        self.by_memory: dict[int, list[tuple[Any, int, Any]]] = {}
        """Kept calls and their entries in torch's record, by the memory that their results lie in."""

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        call = (op, self.calls[context.is_recompute, op])
        self.calls[context.is_recompute, op] += 1
        if context.is_recompute:  # only torch before 2.13 asks again
            return CheckpointPolicy.MUST_SAVE if call in self.kept else CheckpointPolicy.PREFER_RECOMPUTE
        self._follow_last()
        if (positions := _written(op)) and self.by_memory:
            for memory in _memories([args[at] if at < len(args) else kwargs.get(name) for at, name in positions]):
                for changed in self.by_memory.pop(memory, ()):
                    self._drop(*changed)
        verdict: CheckpointPolicy = self.policy(context, op, *args, **kwargs)
        if op is SAME_MEMORY and not self.by_memory.keys().isdisjoint(_memories(args)):
            verdict = CheckpointPolicy.MUST_SAVE  # takes no more memory, and torch's check sees changes of it, too
        if verdict is CheckpointPolicy.MUST_SAVE:
            self.kept.add(call)
            self.last = call
        return verdict

    def _follow_last(self) -> None:
        if self.last is None:
            return
        (op, number), self.last = self.last, None
        results = self.results[op]
        entry = results[-1 if isinstance(results, list) else number]
        for memory in _memories([result.val for result in tree_leaves(entry)]):
            self.by_memory.setdefault(memory, []).append((op, number, entry))

    def _drop(self, op: Any, number: int, entry: Any) -> None:
        """Have a call repeated in the recomputation."""
        if (op, number) not in self.kept:  # has several results, of which another was changed before
            return
        self.kept.remove((op, number))
        if isinstance(self.results[op], list):
            self.results[op].remove(entry)
        else:
            self.results[op][number] = torch_checkpoint._RECOMPUTE


@cache
def _written(op: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an op says it changes; those of an op that says nothing are none."""
    schema = getattr(op, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _memories(values: Any) -> set[int]:
    """The pieces of memory that tensors lie in."""
    return {value.untyped_storage()._cdata for value in tree_leaves(values) if isinstance(value, Tensor)}

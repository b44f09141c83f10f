"""Side effects of a region's forward pass, which its recomputation has no second time: changes of its modules' buffers,
such as the statistics of a batch norm, and of transformers' caches of keys and values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

Forward = Callable[..., Any]
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
Buffers = list[tuple[nn.Module, str, Tensor | None]]
CACHES = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)


def sparing_buffers(modules: Sequence[nn.Module], context_fn: ContextFn) -> ContextFn:
    """`context_fn`, its recomputation working on copies of the buffers of the modules whose buffers the forward pass
    changed.

    What reads a buffer that it has changed reads, when recomputed, the changed value: a batch norm in training reads
    none.
    """
    if not _buffers(modules):
        return context_fn

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, recomputation = context_fn()
        changed: set[nn.Module] = set()
        return _noting_changes(modules, changed, forward), _Repeatable(partial(_on_copies, changed, recomputation))

    return contexts


def sparing_caches(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Forward, tuple[Any, ...], dict[str, Any]]:
    """A call, so that only the first time it is made it changes the caches among its arguments, and each later time
    copies of what they were before."""
    if not any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
        return forward, args, kwargs
    first = [(args, kwargs)]

    def call(*before: Any, **before_by_name: Any) -> Any:
        now, now_by_name = first.pop() if first else copied_caches((before, before_by_name))
        return forward(*now, **now_by_name)

    return call, *copied_caches((args, kwargs))


def copied_caches(value: Any) -> Any:
    """The value with its caches copied, down to their tensors, which are the same: a cache replaces those."""
    if isinstance(value, CACHES):
        result = copy.copy(value)
        result.__dict__.update({name: copied_caches(part) for name, part in vars(value).items()})
        return result
    if type(value) in (list, tuple):
        return type(value)(map(copied_caches, value))
    if type(value) is dict:
        return {key: copied_caches(part) for key, part in value.items()}
    return value


@contextmanager
def _noting_changes(
    modules: Sequence[nn.Module], changed: set[nn.Module], inner: AbstractContextManager[Any]
) -> Iterator[None]:
    """A forward pass, after which `changed` has the modules that it changed a buffer of, or replaced one of.

    Whole modules, for a batch norm's kernel says nothing of the statistics that it changes, while their counter tells.
    """
    before = [(module, name, buffer, _version(buffer)) for module, name, buffer in _buffers(modules)]
    with inner:
        yield
    for module, name, buffer, version in before:
        if module._buffers.get(name) is not buffer or _version(buffer) != version:
            changed.add(module)


class _Repeatable(AbstractContextManager[None]):
    """A context made anew each time it is entered: a graph that is kept is recomputed at each backward pass."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make = make

    def __enter__(self) -> None:
        self.current = self.make()
        self.current.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self.current.__exit__(*raised)


@contextmanager
def _on_copies(changed: set[nn.Module], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """A recomputation, after which the modules' own buffers are again what they were before it."""
    held = [(module, name, buffer) for module in changed for name, buffer in module._buffers.items()]
    for module, name, buffer in held:
        module._buffers[name] = None if buffer is None else buffer.detach().clone()
    try:
        with inner:
            yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer


def _buffers(modules: Sequence[nn.Module]) -> Buffers:
    return [
        (inner, name, buffer)
        for module in modules for inner in module.modules() for name, buffer in inner._buffers.items()
    ]  # fmt: skip


def _version(buffer: Tensor | None) -> int:
    """Count of the tensor's changes in place; tensors of inference mode do not count."""
    return 0 if buffer is None or buffer.is_inference() else buffer._version

"""Recomputed regions: chains of modules whose inner activations are dropped after the forward pass and computed again
in the backward.

A region's modules are called one after the other, each one's first argument being the one before's output (or that
output's first element). Only `forward` is replaced, on the instances: no wrapper module, no renamed parameter. One
module alone goes through torch's public non-reentrant `checkpoint`, which torch.compile understands. Several modules
share one checkpoint, opened when the first is called and closed when the last returns; its recomputation calls the
same modules with the other arguments that each one had. In evaluation mode, and where no gradient is recorded,
regions change nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_map

from tightfit.backends.pytorch.techniques.checkpointing.kept import contexts_of_kept
from tightfit.backends.pytorch.techniques.checkpointing.side_effects import (
    ContextFn,
    Forward,
    copied_caches,
    sparing_buffers,
    sparing_caches,
)
from tightfit.errors import ModelError

Policy = Callable[..., torch_checkpoint.CheckpointPolicy]
PolicyFactory = Callable[[], Policy]


def recompute(model: nn.Module, chains: Iterable[Sequence[nn.Module]], policy: PolicyFactory | None = None) -> None:
    """Make each chain of modules inside `model` a region.

    policy: makes, for each call of a region, the selective policy that says which ops' results to keep.
    Raises ModelError where a chain of several modules names one twice or this torch cannot recompute them together;
    the forward pass raises it where the model does work between a chain's modules.
    """
    context_fn = _context_fn(policy)
    regions = []
    for chain in chains:
        if len(chain) == 1:
            _recompute_one(chain[0], policy)
        elif chain:
            regions.append(_Region(chain, type(model).__name__, context_fn))
    if regions:
        model.register_forward_hook(partial(_close_all, regions), always_call=True)


def compile_module(module: nn.Module, **arguments: Any) -> None:
    """Compile `module` in place, as `module.compile` does.

    A module that shares a region is compiled inside it, so that the recomputation runs the same code. Raises
    ModelError where regions of several modules lie inside `module`: the compiler cannot follow those. One of torch's
    own classes, which `module.compile` leaves as it is, in silence, is compiled all the same, as by `torch.compile`.
    """
    member = module.__dict__.get("forward")
    if isinstance(member, _Member):
        member.compile(**arguments)
        return
    for name, inner in module.named_modules():
        if isinstance(inner.__dict__.get("forward"), _Member):
            raise ModelError(
                f"{type(module).__name__} cannot be compiled: {name} is recomputed together with other modules, which "
                "the compiler cannot follow; write checkpointing=every-block, or compile=off"
            )
    from torch._dynamo import trace_rules  # takes seconds, as the compiler does that comes next

    kind: Any = type(module)
    if member is None and trace_rules.check(kind.forward):
        module.__class__ = _outside_of_torch(kind)
    module.compile(**arguments)


@cache
def _outside_of_torch(kind: type[Any]) -> type[nn.Module]:
    """`kind`, its forward pass called by a function of ours: Dynamo begins with no function of torch's own files."""
    inner = kind.forward

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    return _with_forward(kind, forward)


def _with_forward(kind: type[Any], forward: Forward) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _context_fn(policy: PolicyFactory | None) -> ContextFn:
    """The contexts of a region's forward pass and of its recomputation: the one place where they are made."""
    if policy is None:
        return torch_checkpoint.noop_context_fn
    return lambda: tuple(map(_without_cast_cache, contexts_of_kept(policy())))  # type: ignore[return-value]


def _compiled_contexts(policy: PolicyFactory) -> Any:
    """Contexts for the compiler: it traces both computations into one graph."""
    return torch_checkpoint.create_selective_checkpoint_contexts(policy())


@contextmanager
def _without_cast_cache(inner: AbstractContextManager[Any]) -> Iterator[None]:
    """A block that runs several times would find its weights cast already where its recomputation casts them, and
    torch then takes the two for different computations."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with inner:
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _recompute_one(module: nn.Module, policy: PolicyFactory | None) -> None:
    own = module.__dict__.get("forward")
    if own is None:
        kind: Any = type(module)
        module.__class__ = _recomputed(kind, policy)
    else:  # a forward that this very module was given, by another region or by its maker
        module.forward = partial(_call, own, _first_parameter(own), policy, module)


@cache
def _recomputed(kind: type[Any], policy: PolicyFactory | None) -> type[nn.Module]:
    """`kind`, its forward pass recomputed. One class for all its modules, and none of their own forwards: the compiler
    would take each for another program, and give up after a few."""
    inner = kind.forward
    first = _first_parameter(inner, behind=1)

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _call(partial(inner, self), first, policy, self, *args, **kwargs)

    return _with_forward(kind, forward)


def _call(
    forward: Forward, first: str, policy: PolicyFactory | None, module: nn.Module, /, *args: Any, **kwargs: Any
) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    contexts: dict[str, Any] = {}  # the compiler cannot read torch's own no-op, which is the default
    if not torch.compiler.is_compiling():
        contexts["context_fn"] = sparing_buffers([module], _context_fn(policy))
        forward, args, kwargs = sparing_caches(forward, args, kwargs)
    elif policy is not None:
        contexts["context_fn"] = partial(_compiled_contexts, policy)
    # Only positional tensors say to `checkpoint` which devices' random states to restore.
    if not args and first in kwargs:
        args = (kwargs.pop(first),)
    return torch_checkpoint.checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=True, **contexts, **kwargs
    )


def _first_parameter(forward: Forward, behind: int = 0) -> str:
    """Its name, `behind` so many others."""
    return next(iter([*inspect.signature(forward).parameters][behind:]), "")


@dataclass
class _Member:
    """The `forward` of the module at `index` of a region of several."""

    region: _Region
    index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.region.call(self.index, args, kwargs)

    def compile(self, **arguments: Any) -> None:
        self.region.forwards[self.index] = torch.compile(self.region.forwards[self.index], **arguments)


@dataclass
class _Run:
    """One forward pass of a region under way. `last` is the chained tensor that the next module must be given."""

    checkpoint: Generator[None, None, None]
    calls: list[Forward]
    last: Any = field(repr=False)


class _Region:
    """Several modules that are recomputed together."""

    def __init__(self, modules: Sequence[nn.Module], model: str, context_fn: ContextFn) -> None:
        if len(set(map(id, modules))) < len(modules):
            raise ModelError(
                f"{model} calls the same {type(modules[0]).__name__} several times, so that several calls cannot be "
                "recomputed together; write checkpointing=every-block"
            )
        self.modules = tuple(modules)
        self.model = model
        self.context_fn = context_fn
        self.forwards: list[Forward] = [module.forward for module in modules]
        self.first = [_first_parameter(forward) for forward in self.forwards]
        self.run: _Run | None = None
        for index, module in enumerate(modules):
            module.forward = _Member(self, index)

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = self.forwards[index]
        if index == 0:
            self.abandon()
        elif self.run is None:
            return forward(*args, **kwargs)
        if not (self.modules[0].training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if not args and self.first[index] in kwargs:
            args = (kwargs.pop(self.first[index]),)
        chained, args = (args[0], args[1:]) if args else (None, ())
        run = self.run or self._open(chained)
        if chained is not run.last:
            self.abandon()
            raise ModelError(self._explain(f"does work before its {type(self.modules[index]).__name__}"))
        run.calls.append(_repeated(forward, chained, args, kwargs))
        try:
            output = forward(chained, *args, **kwargs)
        except BaseException:
            self.abandon()
            raise
        run.last = output[0] if isinstance(output, tuple) else output
        if index == len(self.modules) - 1:
            self.run = None
            next(run.checkpoint, None)
        return output

    def abandon(self) -> bool:
        """Close a forward pass that did not reach the last module; whether there was one."""
        run, self.run = self.run, None
        if run is not None:
            run.checkpoint.close()
        return run is not None

    def left_open(self) -> ModelError:
        return ModelError(self._explain(f"ended without calling its {type(self.modules[-1]).__name__}"))

    def _open(self, chained: Any) -> _Run:
        calls: list[Forward] = []
        context_fn = sparing_buffers(self.modules, self.context_fn)
        checkpoint = torch_checkpoint._checkpoint_without_reentrant_generator(
            partial(_replay, calls), True, context_fn, "default", False, True, chained)
        next(checkpoint)
        self.run = _Run(checkpoint, calls, chained)
        return self.run

    def _explain(self, reason: str) -> str:
        names = " -> ".join(type(module).__name__ for module in (self.modules[0], self.modules[-1]))
        return (
            f"{self.model} {reason}, one of {len(self.modules)} modules ({names}) that were to be recomputed "
            "together as a chain; write checkpointing=every-block"
        )


def _repeated(forward: Forward, chained: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
    """A module's call, as the recomputation repeats it: with all but the chained argument, and with the random states
    at the call, for a model may draw numbers between its blocks (layerdrop does)."""
    cpu_state, (devices, states) = torch.get_rng_state(), torch_checkpoint.get_device_states(chained)
    args, kwargs = copied_caches(tree_map(_cut, (args, kwargs)))

    def repeat(chained: Any) -> Any:
        torch.set_rng_state(cpu_state)
        if devices:
            torch_checkpoint.set_device_states(devices, states)
        more, by_name = copied_caches((args, kwargs))
        return forward(chained, *more, **by_name)

    return repeat


def _replay(calls: Sequence[Forward], chained: Any) -> None:
    for call in calls:
        output = call(chained)
        chained = output[0] if isinstance(output, tuple) else output


def _cut(value: Any) -> Any:
    """A tensor without its history: one made inside the region (T5's position bias) would keep the region alive."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _close_all(regions: Sequence[_Region], model: nn.Module, args: Any, output: Any) -> None:
    """After the model's forward pass, or its failure (then `output` is None): no region may stay open."""
    left = [region for region in reversed(regions) if region.abandon()]
    if left and output is not None:
        raise left[0].left_open()

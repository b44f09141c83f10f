"""Modules that treat each token alone, some tokens at a time, in the forward pass and in the backward pass: tiled MLP.

What a module makes on its way, such as a feed-forward part's wide activations or a norm's copies in fp32, is there for
one tile alone. Its input is all that is kept, and it is kept before the module runs: where the block around it is
recomputed, the recomputation ends there, so that tiles cost no forward pass more than the block's own recomputation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils import checkpoint as torch_checkpoint

from tightfit.backends.pytorch import loops
from tightfit.backends.pytorch.experts.active_parameters import experts_of
from tightfit.errors import ModelError

Run = Callable[[Tensor], Tensor]


KNOWN_PACKAGES = ("transformers.", "tightfit.")
"""Packages whose feed-forward parts treat each token alone: what else there is cannot be seen."""
TOKEN_MIXING = (_ConvNd, _BatchNorm, nn.GroupNorm, nn.ZeroPad2d)
"""Modules that are none of one token."""
NORM = re.compile(r"(?:RMS|Layer)Norm$")
COMPILED = "_compiled_tile"
"""Attribute of a module of which each tile runs compiled: its forward, as the compiler returns it."""


def feed_forward_takes_tiles(chain: Sequence[nn.Module]) -> bool:
    """Whether a block's feed-forward part is one module of a known package that treats each token alone: none with
    experts, whose router counts tokens, or with a convolution."""
    if len(chain) != 1 or not type(chain[0]).__module__.startswith(KNOWN_PACKAGES):
        return False
    names = {name for path, _ in chain[0].named_modules() for name in path.split(".")}
    return (names.isdisjoint({"experts", "router", "gate"}) and next(experts_of(chain[0]), None) is None
            and not any(isinstance(module, TOKEN_MIXING) for module in chain[0].modules()))


def norm_takes_tiles(module: nn.Module) -> bool:
    """Whether a module normalizes each token alone, over its last dimension."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) != 1:
        return False
    kind = type(module)
    return (kind.__module__.startswith(("torch.nn.", *KNOWN_PACKAGES)) and NORM.search(kind.__name__) is not None
            and next(module.children(), None) is None and all(parameter.dim() == 1 for parameter in module.parameters())
            and getattr(module, "data_format", "channels_last") == "channels_last")


def tile(module: nn.Module, tokens: int) -> None:
    """Make a module that treats each token alone take so many at a time."""
    kind: Any = type(module)
    module.__class__ = _tiled(kind, tokens)


@cache
def _tiled(kind: type[Any], tokens: int) -> type[nn.Module]:
    """`kind`, some tokens at a time; one class for all modules of a kind."""
    inner = kind.forward

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(getattr(self, COMPILED, inner), self)
        given = [*args, *kwargs.values()]
        hooked = any(parameter._backward_hooks for parameter in self.parameters())  # which would run for each tile
        if len(given) == 1 and isinstance(given[0], Tensor) and given[0].dim() > 1 and not hooked:
            rows = max(1, tokens // max(prod(given[0].shape[:-2]), 1))
            if given[0].shape[-2] > rows:
                return _run_tiles(self, run, given[0], rows)
        return run(*args, **kwargs)  # what else it is given may be of other tokens

    def compile_tile(self: nn.Module, **arguments: Any) -> None:
        setattr(self, COMPILED, torch.compile(inner, **arguments))

    return type(kind.__name__, (kind,), {"forward": forward, "compile": compile_tile, "__module__": kind.__module__,
                                         "__doc__": kind.__doc__})


def _run_tiles(module: nn.Module, run: Run, hidden: Tensor, rows: int) -> Tensor:
    """The module's output for `hidden`, (..., T, H), computed `rows` positions of T at a time."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not (torch.is_grad_enabled() and (hidden.requires_grad or parameters)):
        return _outputs(run, hidden, rows)
    anchor = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
    kept: Tensor = _Kept.apply(anchor)  # type: ignore[no-untyped-call]
    output: Tensor = _Tiles.apply(module, run, rows, kept.grad_fn, kept, *parameters)  # type: ignore[no-untyped-call]
    return output


def _outputs(run: Run, hidden: Tensor, rows: int) -> Tensor:
    whole = _Whole(hidden.shape)
    starts, size = loops.equal_turns(hidden.shape[-2], rows)
    for start in loops.turns(starts):
        whole.put(start, run(_tile(hidden, start, size)))
    return whole.tensor


def _tile(hidden: Tensor, start: int, size: int) -> Tensor:
    """A tile: some rows of the last dimension but one; contiguous, as some modules want it."""
    return hidden.narrow(-2, start, min(size, hidden.shape[-2] - start)).contiguous()


class _Whole:
    """A tensor that is written tile by tile. shape: its own, but for the last dimension, which tiles have."""

    tensor: Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = shape

    def put(self, start: int, tile: Tensor) -> None:
        if not isinstance(tile, Tensor) or len(tile.shape) != len(self._shape):
            raise ModelError("checkpointing: tiled-mlp cuts a feed-forward part that returns more than a row for each "
                             "token; write checkpointing=every-block")
        if start == 0:
            self.tensor = tile.new_empty((*self._shape[:-1], tile.shape[-1]))
        self.tensor.narrow(-2, start, tile.shape[-2]).copy_(tile)


class _Kept(torch.autograd.Function):
    """Its input, kept for the backward pass of the tiles that are made of it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Tiles(torch.autograd.Function):
    """A module's output from its input and its parameters; its backward pass runs each tile again."""

    @staticmethod
    def forward(
        ctx: Any, module: nn.Module, run: Run, rows: int, kept: Any, hidden: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.module, ctx.run, ctx.rows, ctx.kept = module, run, rows, kept
        ctx.again = _repeated(module, hidden)
        return _outputs(run, hidden, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.kept.saved_tensors
        passes = _Backward(ctx.module, ctx.run, hidden, gradient)
        starts, size = loops.equal_turns(hidden.shape[-2], ctx.rows)
        with ctx.again(), torch.enable_grad():
            for start in loops.turns(starts):
                passes.add(start, size)
        return None, None, None, None, passes.whole.tensor, *passes.sums


class _Backward:
    """The backward passes of tiles: gradients of the parameters, summed, and that of the input."""

    def __init__(self, module: nn.Module, run: Run, hidden: Tensor, gradient: Tensor) -> None:
        # The module's own at this time: streamed blocks bind others to them.
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._run, self._hidden, self._gradient = run, hidden, gradient
        self.whole = _Whole(hidden.shape)
        self.sums: Sequence[Tensor | None] = ()

    def add(self, start: int, size: int) -> None:
        tile = _tile(self._hidden, start, size).detach().requires_grad_()
        output = self._run(tile)
        of_tile, *found = torch.autograd.grad(
            output, [tile, *self._parameters], self._gradient.narrow(-2, start, tile.shape[-2]), allow_unused=True)
        self.whole.put(start, of_tile)
        if not self.sums:
            self.sums = _owned(found, self._gradient)
            return
        self.sums = [part if summed is None else summed if part is None else summed.add_(part)
                     for summed, part in zip(self.sums, found, strict=True)]


def _owned(gradients: Sequence[Tensor | None], other: Tensor) -> list[Tensor | None]:
    """Gradients that may be added to in place: each in memory of its own, and none in another tensor's."""
    taken = {other.untyped_storage()._cdata}
    owned: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is not None:
            place = gradient.untyped_storage()._cdata
            if place in taken or not torch.ops.aten.is_non_overlapping_and_dense(gradient):
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            taken.add(place)
        owned.append(gradient)
    return owned


def _repeated(module: nn.Module, hidden: Tensor) -> Callable[[], Any]:
    """The context in which the module's forward pass is the one at hand again: its autocast, without the casts that it
    keeps, and its random numbers."""
    kind = hidden.device.type
    autocast = partial(torch.autocast, kind, dtype=torch.get_autocast_dtype(kind),
                       enabled=torch.is_autocast_enabled(kind), cache_enabled=False)
    draws = module.training and not NORM.search(type(module).__name__)
    cpu_state = torch.get_rng_state() if draws else None
    devices, states = torch_checkpoint.get_device_states(hidden) if draws else ([], [])

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            if cpu_state is not None:
                stack.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(cpu_state)
                torch_checkpoint.set_device_states(devices, states)
            stack.enter_context(autocast())
            yield

    return again

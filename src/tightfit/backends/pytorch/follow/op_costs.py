"""Cost of a dispatched op: floating-point operations, bytes of memory, kernels, and its class.

Counted from shapes, strides and formats alone, so that fake tensors serve as well as real ones.

FLOPs: 2 for each multiply-add of a tensor contraction, 0 for everything else, which memory binds. Attention counts the
pairs of positions that its kernel works on: a causal or windowed kernel skips what is ruled out, T (T + 1) / 2 of the
T x T pairs; a dense mask hides pairs and saves no work. (torch.utils.flop_counter counts all pairs for both.)
Documents of variable-length attention are taken as equally long: offsets lie on the device, and fake ones hold nothing.

Bytes: every distinct element of every argument once, and every element of every result; a broadcast dimension counts
once. Ops that touch part of an argument, such as `embedding`, count that part (`PARTIAL`). Caches are not considered.

Classes: a cast to another dtype is element-wise, since it works on each value and compilers fuse it as such; a copy in
the same dtype is data movement, filling and generating included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tightfit.backends.pytorch.follow.memory import tensors_in
from tightfit.backends.pytorch.follow.op_classes import SHAPE_ONLY, WITHOUT_KERNEL, WRITE_ONLY, class_of
from tightfit.backends.pytorch.follow.op_flops import FLOPS, registered_flops
from tightfit.trace import OpClass

Arguments = tuple[Any, ...]
Traffic = Callable[[Arguments, dict[str, Any], Any], tuple[int, int]]

MAX_SHAPES = 8
"""An op over lists of tensors names no more shapes than this."""


class Cost(NamedTuple):
    """Cost of one op. `dtype` is the format it computes in. `kernels` is 0 for views and allocation, else 1: what else
    some ops launch hardly shows in a step's time."""

    op_class: OpClass
    flops: int
    bytes_read: int
    bytes_written: int
    kernels: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    leading: tuple[int, ...] = ()
    layout: Literal["", "strided", "cast", "dropout"] = ""


NO_COST = Cost(OpClass.OTHER, 0, 0, 0, 0, "", ())


class _Facts(NamedTuple):
    """Facts of an overload's schema and name, read once. dropout: the place of attention's share to drop."""

    name: str
    free: bool
    op_class: OpClass
    flops: Callable[[Any, Arguments, dict[str, Any], Any], int] | None
    traffic: Traffic | None
    written: frozenset[int | str]
    reads_written: bool
    lists: bool
    dropout: int | None


def cost(func: Any, args: Arguments, kwargs: dict[str, Any], result: Any) -> Cost:
    """The cost of `func(*args, **kwargs)`, which gave `result`, on a CUDA device. Reads shapes, dtypes and strides.

    func: an OpOverload or a higher-order operator, as a TorchDispatchMode is given it.
    """
    facts = _facts(func)
    if facts.free:
        return NO_COST
    read = written = 0
    inputs: list[Tensor] = []
    for place, value in (*enumerate(args), *kwargs.items()):
        if facts.lists or isinstance(value, Tensor):
            tensors = list(tensors_in(value))
            inputs += tensors
            size = sum(map(_bytes, tensors))
            written += size if place in facts.written else 0
            read += size if facts.reads_written or place not in facts.written else 0
    results = list(tensors_in(result))
    if not facts.written:
        written += sum(map(_bytes, results))
    if facts.traffic is not None:
        read, written = facts.traffic(args, kwargs, result)
    flops = 0 if facts.flops is None else facts.flops(func, args, kwargs, result)
    # What a product is added to may be wider than what is multiplied.
    dtype = _dtype(inputs[1:] if facts.name == "addmm" else inputs) or _dtype(results)
    op_class, tensors = facts.op_class, [*inputs, *results]
    plain = op_class is OpClass.CONTRACTION or facts.lists or facts.traffic is not None or _alike(tensors)
    layout: Literal["", "strided", "cast", "dropout"] = "" if plain and facts.name != "cat" else "strided"
    if facts.name in ("_to_copy", "copy_", "_foreach_copy_"):
        casts = len({t.dtype for t in tensors}) > 1
        op_class, layout = (OpClass.ELEMENTWISE, "cast") if casts else (OpClass.MOVEMENT, layout)
    elif facts.dropout is not None and facts.dropout < len(args) and args[facts.dropout]:
        layout = "dropout"
    kernels = int(bool(read or written or flops))  # else nothing is in it
    shapes = tuple(tuple(t.shape) for t in inputs[:MAX_SHAPES])
    leading = () if op_class is not OpClass.CONTRACTION else tuple(
        int(max(tensor.stride()[-2:])) for tensor in tensors if _has_rows(tensor))
    return Cost(op_class, flops, read, written, kernels, dtype, shapes, leading, layout)


@functools.cache
def _facts(func: Any) -> _Facts:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator: its name is all there is
        name = func.name() if callable(getattr(func, "name", None)) else str(func)
        arguments, returns = [], []
    else:
        name, arguments, returns = schema.name.rpartition("::")[2], schema.arguments, schema.returns
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return _Facts(
        name=name,
        free=views or name in WITHOUT_KERNEL or getattr(func, "namespace", "") in ("prim", "profiler"),
        op_class=class_of(name, func),
        flops=FLOPS.get(name) or registered_flops(func),
        traffic=PARTIAL.get(name),
        written=frozenset(a.name if a.kwarg_only else position for position, a in enumerate(arguments)
                          if a.alias_info is not None and a.alias_info.is_write),
        reads_written=name not in WRITE_ONLY and not (schema and schema.overload_name.endswith("out")),
        lists=schema is None or any("[]" in str(a.type) or "List" in str(a.type) for a in arguments),
        dropout=next((place for place, a in enumerate(arguments) if a.name == "dropout_p"), None),
    )


def _dtype(tensors: Iterable[Tensor]) -> str:
    """The first floating-point format among the tensors, else the first format."""
    first = ""
    for tensor in tensors:
        dtype = tensor.dtype
        if dtype.is_floating_point:
            return _dtype_name(dtype)
        first = first or _dtype_name(dtype)
    return first


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's distinct elements."""
    count: int = tensor.numel()
    if tensor.layout is torch.strided and 0 in (stride := tensor.stride()):
        count = math.prod(size if step else min(size, 1) for size, step in zip(tensor.shape, stride, strict=True))
    return count * tensor.element_size()


def _has_rows(tensor: Tensor) -> bool:
    """Whether a product's operand has rows in memory: neither a vector nor a bias that is expanded."""
    return tensor.dim() > 1 and min(tensor.shape[-2:]) > 1 and min(tensor.stride()[-2:]) > 0


def _alike(tensors: Sequence[Tensor]) -> bool:
    """Whether an op's tensors have their elements in one order without gaps, scalars aside: what kernels run through
    as one row."""
    large = [tensor for tensor in tensors if tensor.numel() > 1]
    if len({tensor.shape for tensor in large}) != 1:
        return not large
    last = sum((size - 1) * step for size, step in zip(large[0].shape, large[0].stride(), strict=True))
    return len({tensor.stride() for tensor in large}) == 1 and last + 1 == large[0].numel()


# Ops that touch a part of their arguments: (bytes read, bytes written).


def _all(value: Any) -> int:
    return sum(map(_bytes, tensors_in(value)))


def _gathered(args: Arguments, kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Rows or elements picked out of the first tensor, or the weight: as many as the result holds, and the indices."""
    size = _all(result)
    return size + _all([a for a in args[1:] if not isinstance(a, int | float)]), size


def _into_zeros(args: Arguments, kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """A result of zeros into which the first argument, a gradient, is put or added."""
    gradient = _all(args[:1])
    return _all(args), _all(result) + gradient


def _put(args: Arguments, kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Values put into the first argument in place; it is read where they are added."""
    values = [v for v in args[1:] if isinstance(v, Tensor)][-1:]
    return _all(args[1:]) + _all(values), _all(values)


def _generated(args: Arguments, kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """A result of an argument's shape; the argument is not read."""
    return 0, _all(result)


def _picked_loss(args: Arguments, kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """One log-probability a label."""
    labels = args[1]
    return _all(args[1:]) + labels.numel() * args[0].element_size(), _all(result)


def _loss_into_zeros(args: Arguments, kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Zeros, and one value a label: the log-probabilities themselves are not read."""
    labels = args[2]
    return _all(args[:1]) + _all(args[2:]), _all(result) + labels.numel() * result.element_size()


def _exchanged(first: int, second: int = 0) -> Traffic:
    """As much sent as received, by each of n processes in a ring (Patarasuk and Yuan 2009): so many times the first
    argument's bytes and the second's. Where one is the whole and the other a part, (n - 1)/n of the whole."""

    def traffic(args: Arguments, kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
        size = first * _all(args[:1]) + second * _all(args[1:2])
        return size, size

    return traffic


PARTIAL: dict[str, Traffic] = {
    "_allgather_base_": _exchanged(1, -1), "_reduce_scatter_base_": _exchanged(-1, 1), "all_reduce": _exchanged(2),
    "all_gather_copy_in": _exchanged(1),
    "embedding": _gathered, "index": _gathered, "index_select": _gathered, "gather": _gathered,
    "take_along_dim": _gathered,
    "embedding_dense_backward": _into_zeros, "slice_backward": _into_zeros, "select_backward": _into_zeros,
    "index_put_": _put, "index_add_": _put, "index_copy_": _put, "scatter_": _put, "scatter_add_": _put,
    "scatter_reduce_": _put,
    **dict.fromkeys(SHAPE_ONLY, _generated),
    "nll_loss_forward": _picked_loss, "nll_loss2d_forward": _picked_loss,
    "nll_loss_backward": _loss_into_zeros, "nll_loss2d_backward": _loss_into_zeros,
}

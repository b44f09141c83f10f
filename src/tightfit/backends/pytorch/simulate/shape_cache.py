"""Shapes of results, remembered: a step asks for the same few hundred ops thousands of times.

Fake tensors remember too, but what they look an op up by takes most of its time. An op is known here by its
overload, the shapes, strides and formats of its tensors, and its other arguments. What is known holds for every later
trace for a device of the same kind and compute capability, as the next of a search.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

MISSING = object()
"""Result of `ShapeCache.result` where an op is not known, or cannot be."""

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)

Form = tuple[str, Any]
"""Making of a result: `same` as the argument of that place, `new` or a `view` of an argument, with its metadata; a
`value` that is no tensor."""

Kept = tuple[type | None, tuple[Form | None, ...]]
"""An op's results: what they come in, a tuple or a list, None for one alone; and how each is made."""

Known = dict[tuple[Any, ...], Kept]

MOST_OPS = 50_000
"""Ops that are remembered at once: those of a hundred traces or so."""


class _NotKept(Exception):
    """An op with arguments or results that are not remembered."""


class ShapeCache:
    """Results of ops on the fake tensors of one mode, by the shapes of their arguments.

    known: ops of earlier modes with the same rules; those of this mode are added.
    """

    def __init__(self, mode: FakeTensorMode, known: Known | None = None) -> None:
        self._mode = mode
        self._known: Known = {} if known is None else known
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Key of the op; None for one that cannot be remembered."""
        parts: list[Any] = [func, torch.get_default_dtype()]
        try:
            for arg in args:
                self._describe(arg, parts)
            for name, value in kwargs.items():
                parts.append(name)
                self._describe(value, parts)
        except _NotKept:
            return None
        return tuple(parts)

    def _describe(self, value: Any, parts: list[Any]) -> None:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.fake_mode is not self._mode or value._has_symbolic_sizes_strides:
                raise _NotKept  # a size that is still a symbol, in what a compiler traces, has no hash
            parts += (value.shape, value.stride(), value.dtype, value.storage_offset())
        elif kind is list or kind is tuple:
            parts.append(len(value))
            for part in value:
                self._describe(part, parts)
        elif isinstance(value, PLAIN):
            parts += (kind, value)  # 1, 1.0 and True are one key, and not one op
        else:
            raise _NotKept

    def result(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        """The op's result, made anew, or `MISSING`."""
        found = self._known.get(key)
        if found is None:
            return MISSING
        kind, forms = found
        made = [None if form is None else self._make(form, args) for form in forms]
        if kind is None:
            return made[0]
        return made if kind is list else tuple(made)

    def remember(self, key: tuple[Any, ...], args: tuple[Any, ...], result: Any) -> None:
        """Keep how a result was made, where it can be made again."""
        if torch.Tag.inplace_view in getattr(key[0], "tags", ()):
            return  # it changes its argument's shape, as well as giving it back
        kind = type(result) if type(result) in (tuple, list) else None
        if result is None and key[0]._schema.returns:
            return  # only an op that works in place gives nothing
        if len(self._known) >= MOST_OPS:
            self._known.clear()
        try:
            self._known[key] = (kind, tuple(self._form(part, args) for part in ((result,) if kind is None else result)))
        except _NotKept:
            return

    def _form(self, result: Any, args: tuple[Any, ...]) -> Form | None:
        if result is None:
            return None
        if isinstance(result, torch.dtype):
            return ("value", result)
        if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
            raise _NotKept
        if result._has_symbolic_sizes_strides:
            raise _NotKept
        storage = result.untyped_storage()
        for place, arg in enumerate(args):
            if arg is result:
                return ("same", place)
            if type(arg) is FakeTensor and arg.untyped_storage()._cdata == storage._cdata:
                return ("view", (place, *_metadata(result)))
        needed = torch._prims_common.compute_required_storage_length(result.shape, result.stride(), 0)
        if result.storage_offset() or storage.nbytes() != needed * result.dtype.itemsize:
            raise _NotKept  # part of something larger, or of an argument in a list
        return ("new", _metadata(result))

    def _make(self, form: Form, args: tuple[Any, ...]) -> Any:
        how, what = form
        if how == "value":
            return what
        if how == "same":
            same: Tensor = args[what]
            return same
        if how == "view":
            place, shape, stride, dtype, offset, device = what
            empty = torch.empty(0, dtype=dtype, device="meta")
            empty.set_(args[place].untyped_storage(), offset, shape, stride)
        else:
            shape, stride, dtype, offset, device = what
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return self._fake(empty, device)

    def _fake(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor of a meta tensor's shape. Its attributes are those of one that torch made: checking what they
        are made from takes most of the time."""
        attributes = self._attributes.get(device)
        if attributes is None:
            attributes = self._attributes[device] = dict(FakeTensor(self._mode, meta, device).__dict__)
        fake = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(attributes)
        return fake


def _metadata(tensor: FakeTensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.fake_device

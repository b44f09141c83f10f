"""Shapes of results, remembered: a step asks for the same few hundred ops thousands of times.

Fake tensors remember too, but what they look an op up by takes most of its time. An op is known here by its
overload, the shapes, strides and formats of its tensors, and its other arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

MISSING = object()
"""What `ShapeCache.result` gives where an op is not known, or cannot be."""

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)

Form = tuple[str, Any]
"""How a result is made: `same` as the argument of that place, `new` or a `view` of an argument, with its metadata."""


class _NotKept(Exception):
    """An op with arguments or results that are not remembered."""


class ShapeCache:
    """Results of ops on the fake tensors of one mode, by the shapes of their arguments."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[tuple[Any, ...], tuple[bool, tuple[Form | None, ...]]] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """What the op is known by; None for one that cannot be remembered."""
        parts: list[Any] = [func]
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
            if value.constant is not None or value.fake_mode is not self._mode:
                raise _NotKept
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
        single, forms = found
        made = [None if form is None else self._make(form, args) for form in forms]
        return made[0] if single else tuple(made)

    def remember(self, key: tuple[Any, ...], args: tuple[Any, ...], result: Any) -> None:
        """Keep how a result was made, where it can be made again."""
        single = isinstance(result, Tensor)
        if not (single or type(result) is tuple):
            return
        try:
            forms = tuple(self._form(part, args) for part in ((result,) if single else result))
        except _NotKept:
            return
        self._known[key] = (single, forms)

    def _form(self, result: Any, args: tuple[Any, ...]) -> Form | None:
        if result is None:
            return None
        if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
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

    def _make(self, form: Form, args: tuple[Any, ...]) -> Tensor:
        how, what = form
        if how == "same":
            same: Tensor = args[what]
            return same
        if how == "view":
            place, shape, stride, dtype, offset, device = what
            with torch._subclasses.fake_tensor.in_kernel_invocation_manager(self._mode):
                empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                empty.set_(args[place].untyped_storage(), offset, shape, stride)
        else:
            shape, stride, dtype, offset, device = what
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self._mode, empty, device)


def _metadata(tensor: FakeTensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.fake_device

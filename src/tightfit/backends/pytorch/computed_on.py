"""Dispatch mode that runs ops on host tensors on the GPU, so that weights initialized in host memory get the GPU's
random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

aten = torch.ops.aten

EXACT = {aten.empty, aten.zeros, aten.ones, aten.fill_, aten.zero_, aten.copy_, aten.clone, aten._to_copy,
         aten._local_scalar_dense}
"""Ops beside views that compute nothing: they stay on the host."""


class ComputedOn(TorchDispatchMode):
    """A dispatch mode in which ops on host tensors run on a device, and their results come back.

    A model that is made on the host inside draws the same random numbers, and rounds in the same way, as one that is
    made on the device, which holds one op's tensors at a time.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func.overloadpacket in EXACT:
            return func(*args, **kwargs)
        overwritten = args[0] if torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable else None
        pairs: list[tuple[Tensor, Tensor]] = []

        def there(value: Any) -> Any:
            if isinstance(value, Tensor) and value.device.type == "cpu":
                pairs.append((value, self._copy(value, value is overwritten)))
                return pairs[-1][1]
            return self._device if isinstance(value, torch.device) and value.type == "cpu" else value

        moved_args, moved_kwargs = tree_map(there, (args, kwargs))
        result = func(*moved_args, **moved_kwargs)
        if func._schema.is_mutable:
            for host, copy in pairs:
                host.copy_(copy)
        back = {id(copy): host for host, copy in pairs}
        return tree_map_only(Tensor, lambda made: back[id(made)] if id(made) in back else made.cpu(), result)

    def _copy(self, tensor: Tensor, overwritten: bool) -> Tensor:
        """The tensor on the device; without its values where the op draws others."""
        if overwritten:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        return tensor.to(self._device)

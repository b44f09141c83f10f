"""Other compositions of torch's composed ops, for some tensors and for a while.

They are put into the dispatcher and not into a mode, because they have to be there inside C++ compositions, and while a
backward pass recomputes; above autograd, so that what is saved for the backward pass is what they save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulated_device import TargetOf

Compositions = Mapping[Any, Callable[..., Any]]
"""By op; each takes the device and the op's arguments, and gives NotImplemented to leave a call to the op's own."""

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@contextmanager
def override_decompositions(compositions: Compositions, device_of: TargetOf) -> Iterator[None]:
    """Put compositions in, for CPU tensors that `device_of` knows; others keep theirs. Undone on leaving."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for op, compose in compositions.items():
            op._dispatch_cache.clear()
            library.impl(op._name, partial(_composed, op, compose, device_of), "AutogradCPU", allow_override=True)
        yield
    finally:
        library._destroy()
        for op in compositions:  # which remembers where it was dispatched to
            op._dispatch_cache.clear()


def _composed(op: Any, compose: Callable[..., Any], device_of: TargetOf, *args: Any, **kwargs: Any) -> Any:
    device = device_of(args[0])
    result = NotImplemented if device is None else compose(device, *args, **kwargs)
    # The op's own composition, as if nothing stood in its place.
    return op._op_dk(COMPOSITE, *args, **kwargs) if result is NotImplemented else result


def other_modes() -> bool:
    """Whether a mode listens that would also listen to real tensors: neither the fake tensors' own nor a tracker."""
    return any(not isinstance(mode, FakeTensorMode | Tracker) for mode in _get_current_dispatch_mode_stack())

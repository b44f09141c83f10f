"""Fake CPU tensors that stand for tensors on a device that need not be present, and torch's choices for that device.

    with simulate(device), PlanningMode(device):
        ...  # the training step, on tensors made here

A CPU's tensors have no CUDA kernels, and CUDA's need a GPU; so tensors say "cpu", and what torch would decide by asking
for "cuda" is decided here. Written for torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.utils._foreach_utils
from torch import Tensor
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from tightfit.backends.pytorch.follow.dispatch_mode import never_compiled
from tightfit.backends.pytorch.follow.tracker import Scratch
from tightfit.backends.pytorch.simulate import cpu_scratch, kernels
from tightfit.backends.pytorch.simulate.cuda import scratch as cuda_scratch
from tightfit.backends.pytorch.simulate.cuda.autocast import autocast_as_on_cuda
from tightfit.backends.pytorch.simulate.data_dependent import hide_fakeness
from tightfit.backends.pytorch.simulate.scripted import scripts_as_python
from tightfit.backends.pytorch.simulate.shape_cache import MISSING, Known, ShapeCache
from tightfit.backends.pytorch.simulated_device import simulated_cuda_device
from tightfit.devices import Device
from tightfit.garbage import gc_paused

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

FAKE_RULES: Mapping[Any, Any] = registered_hop_fake_fns
"""Higher-order ops whose rules torch finds for any fake mode."""


MOST_KNOWN = 1024
"""Values that a fake tensor knows at most, where they hang on no others: those of a linspace, of a list, and what is
made of such alone. Models read rates and places of their blocks from them as they are built. What is made of known
values is computed for real, so they are to be few."""


class PlanningMode(FakeTensorMode):
    """Fake tensors, with "cpu" as their device, that stand for tensors on `target`.

    CUDA's own choices hold inside `simulate(target)`; without it torch chooses as on the CPU.
    """

    supports_higher_order_operators = True

    def __init__(self, target: Device, **options: Any) -> None:
        super().__init__(**options)
        never_compiled(type(self).__torch_dispatch__)
        self.target = target
        self._shapes = ShapeCache(self, _known_ops(target.kind, target.capability))
        self._rules = kernels.CUDA_SHAPES if target.kind == "cuda" else kernels.CPU_SHAPES

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key, given = self._shapes.key(func, args, kwargs), (*args, *kwargs.values())  # `out` is the result itself
        if key is not None:
            result = self._shapes.result(key, given)
            if result is not MISSING:
                return result
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if key is not None:
            self._shapes.remember(key, given, result)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard around every op, as in `follow.dispatch_mode`."""
        return False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule: Any = self._rules.get(func)
        if func is torch.ops.higher_order.run_and_save_rng_state and self.target.kind == "cuda":
            with self:  # a GPU's random state is kept on the host: it takes nothing of the device
                return torch.empty(0, dtype=torch.uint8), args[0](*args[1:], **(kwargs or {}))
        if isinstance(func, HigherOrderOperator) and func not in FAKE_RULES:
            rule = partial(func.python_key_table[FakeTensorMode], self)  # torch finds these by the mode's exact class
        if rule is not None:
            return rule(*args, **(kwargs or {}))
        result: Any = super().dispatch(func, types, args, kwargs or {})
        if func is torch.ops.aten.linspace.default and result.device.type == "cpu" and result.numel() <= MOST_KNOWN:
            with no_dispatch():  # for real
                values = func(*args, **(kwargs or {}))
            return self.fake_tensor_converter.from_real_tensor(self, values, make_constant=True)
        return result

    def may_turn_const(self, t: Tensor) -> bool:
        """Whether values that hang on no others are kept, for whoever reads them. torch alone keeps single ones."""
        real = t.device.type == "cpu" and not isinstance(t, FakeTensor)
        return real and t.layout is torch.strided and t.numel() <= MOST_KNOWN


@cache
def _known_ops(kind: str, capability: tuple[int, int] | None) -> Known:
    """Ops met so far on devices of that kind, which is all that shape rules ask of a device."""
    return {}


@contextmanager
def fake_tensors(device: Device) -> Iterator[None]:
    """Context in which all tensors are fake ones that stand for `device`'s; torch and transformers choose as there."""
    with gc_paused(), simulate(device), PlanningMode(device), hide_fakeness(), scripts_as_python():
        yield


def scratch_of(device: Device) -> Scratch:
    """Bytes that a kernel of the device takes and gives back while it runs."""
    return cpu_scratch.scratch if device.kind == "cpu" else cuda_scratch.scratch


@contextmanager
def simulate(device: Device) -> Iterator[None]:
    """Context in which torch chooses, where a `PlanningMode` stands for a CUDA device, as it would there: which ops
    autocast casts, which attention kernel runs, what dropout keeps, foreach loops over gradients. Real tensors are
    treated as ever, and for the CPU nothing changes. Everything is put back on leaving.

    Of the optimizers' own defaults (foreach, fused) none changes: name the implementation.
    """
    if device.kind == "cpu":
        yield
        return
    with autocast_as_on_cuda(), _override_decompositions(), _fake_foreach():
        yield


@contextmanager
def _override_decompositions() -> Iterator[None]:
    """Put CUDA's compositions in, for CPU tensors that stand for its; others keep theirs. Undone on leaving.

    They are put into the dispatcher and not into a mode, because they have to be there inside C++ compositions, and
    while a backward pass recomputes.
    """
    library = torch.library.Library("aten", "IMPL")
    never_compiled(_composed)
    try:
        for op, compose in kernels.CUDA_COMPOSITIONS.items():
            op._dispatch_cache.clear()
            library.impl(op._name, partial(_composed, op, compose), "AutogradCPU", allow_override=True)
        yield
    finally:
        library._destroy()
        for op in kernels.CUDA_COMPOSITIONS:  # which remembers where it was dispatched to
            op._dispatch_cache.clear()


def _composed(op: Any, compose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    device = simulated_cuda_device(args[0])
    result = NotImplemented if device is None else compose(device, *args, **kwargs)
    # The op's own composition, as if nothing stood in its place.
    return op._op_dk(COMPOSITE, *args, **kwargs) if result is NotImplemented else result


@contextmanager
def _fake_foreach() -> Iterator[None]:
    """Gradient clipping takes its foreach form for plain tensors only, and fake tensors stand for such. A torch that
    keeps no list of such types loops over fake tensors, which costs the same memory."""
    types: list[Any] = getattr(torch.utils._foreach_utils, "_foreach_supported_types", [])
    types.append(FakeTensor)
    try:
        yield
    finally:
        types.remove(FakeTensor)

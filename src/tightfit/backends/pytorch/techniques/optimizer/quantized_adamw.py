"""torchao's AdamW with states of 8 and 4 bits, its embeddings left at 32 bits. Importing this needs torchao."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torchao import optim as torchao_optim
from torchao.optim import subclass_4bit, subclass_8bit
from torchao.optim.adam import single_param_adam

from tightfit.backends.pytorch.techniques.by_block.transfers import active_watch
from tightfit.backends.pytorch.techniques.optimizer.compiled_update import any_number_of_shapes
from tightfit.trace import FUSED_PREFIX

STATE_PARTS = ("codes", "scale")
"""Tensors that a quantized state keeps for its own parameter; its table of values is shared."""


class _Quantized:
    """Base of both. Mixed in before a torchao optimizer, whose learning rate is a tensor to be filled in place.

    groups: parameter groups. in_32_bits: parameters whose states stay fp32, the embeddings: their rows see gradients
        rarely and of very different size, which one scale over a block of rows fits badly (Dettmers et al. 2022).
    declared: whether an update asks for what torchao's compiled kernel would, and computes nothing: for planning a
        device that is not there, where no kernel can be compiled.
    Tensors of fewer than 4096 values, or not a multiple of the block, are not quantized either: their states are fp32.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]
    bf16_stochastic_round: bool

    def __init__(
        self, groups: list[dict[str, Any]], *, in_32_bits: Iterable[nn.Parameter], declared: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        self._in_32_bits, self._declared = frozenset(in_32_bits), declared
        super().__init__(groups, **options)  # type: ignore[call-arg]
        # torchao reads these tables' values once, which fake tensors have not. Torch's way out of those is private.
        with unset_fake_temporarily():
            for module in (subclass_4bit, subclass_8bit):
                module.get_qmap_signed()
                module.get_qmap_unsigned()

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        if p in self._in_32_bits:
            return torch.zeros_like(p, dtype=torch.float32)
        buffer: Tensor = super()._new_buffer(p, signed)  # type: ignore[misc]
        return buffer if is_traceable_wrapper_subclass(buffer) else buffer.float()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update: torchao's formula, compiled for parameters on CUDA; elsewhere compiling may lack a C++ compiler
        and would not pay."""
        loss = None if closure is None else closure()
        learned = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        compiles = not self._declared and any(p.is_cuda for p, _ in learned)  # others may wait in host memory
        with any_number_of_shapes() if compiles else nullcontext():
            for parameter, group in learned:
                self._update(parameter, group, _compiled_update() if compiles else single_param_adam)
        return loss

    @torch.no_grad()
    def _update(self, parameter: Tensor, group: dict[str, Any], update: Callable[..., None]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = self._new_buffer(parameter, True)
            state["exp_avg_sq"] = self._new_buffer(parameter, False)
        state["step"] += 1
        if self._declared:
            with active_watch().region(f"{FUSED_PREFIX}update"):
                _as_compiled(parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            return
        update(
            parameter.detach(), parameter.grad, state["step"], state["exp_avg"], state["exp_avg_sq"],
            max_exp_avg_sq=None, lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
            weight_decay=group["weight_decay"], eps=group["eps"], IS_ADAMW=True,
            BF16_STOCHASTIC_ROUND=self.bf16_stochastic_round and parameter.dtype is torch.bfloat16,
        )  # fmt: skip


@functools.cache
def _compiled_update() -> Callable[..., None]:
    """The formula compiled. torchao compiles it anew at each parameter of each step, and finds what it compiled before:
    that costs the host more than the call, 0.9 milliseconds a parameter against 0.4 on a processor."""
    return torch.compile(single_param_adam, fullgraph=True, dynamic=False)


def _as_compiled(parameter: Tensor, grad: Tensor, *averages: Tensor) -> None:
    """Ask for the memory, and move the bytes, that the compiled update of a parameter does.

    The kernel updates weights and states in place. Where states are quantized, the new averages in units of their
    block's scale, fp32 and as large as the parameter, are kept until their codes are found, and so are the scales; of
    4-bit states, of which a byte holds two, the codes too, one by one as they were and as they become. What Inductor
    makes of it for the CPU shows them. A GPU's kernel may keep some in registers: this is the most.
    """
    kept = list[Tensor]()
    for average in averages:
        parts = [average]
        if is_traceable_wrapper_subclass(average):
            parts = [getattr(average, name) for name in average.__tensor_flatten__()[0] if name in STATE_PARTS]
            kept += [torch.empty_like(parameter, dtype=torch.float32), torch.empty_like(parts[-1])]
            if parts[0].numel() < parameter.numel():
                kept += [torch.empty_like(parameter, dtype=torch.uint8), torch.empty_like(parameter, dtype=torch.int64)]
        for part in parts:
            part.neg_()
    parameter.add_(grad)


class AdamW8bit(_Quantized, torchao_optim.AdamW8bit):  # type: ignore[misc]
    """AdamW whose states take 8 bits a value and one fp32 scale a block."""


class AdamW4bit(_Quantized, torchao_optim.AdamW4bit):  # type: ignore[misc]
    """AdamW whose states take 4 bits a value and one fp32 scale a block."""

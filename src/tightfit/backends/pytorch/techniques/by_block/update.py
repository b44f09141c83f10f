"""The update of the weights block by block: in the backward pass, after it, or when the next forward pass needs it.

After the backward pass everything that an update needs is known: the norm of all gradients, whether they are finite,
the learning rate. So clipping, loss scaling and schedules are exact, whenever a block's turn comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.by_block.block_calls import BlockCalls
from tightfit.backends.pytorch.techniques.by_block.offloaded_state import OffloadedState
from tightfit.backends.pytorch.techniques.by_block.parts import WITHOUT_BLOCKS
from tightfit.backends.pytorch.techniques.by_block.state_dicts import StateDictHooks
from tightfit.backends.pytorch.techniques.by_block.transfers import active_watch
from tightfit.backends.pytorch.techniques.optimizer.state import make_states, set_learning_rate
from tightfit.backends.pytorch.weight_update import WeightUpdate
from tightfit.errors import ModelError
from tightfit.techniques.update import Update
from tightfit.trace import Phase


@dataclass
class _PendingUpdate:
    """An update that some parts still wait for.

    norm: of all gradients before clipping; None where none was taken. seed: of the random numbers that round weights;
    None where nothing is drawn.
    """

    learning_rate: float
    norm: Tensor | None
    parts: set[int]
    seed: int | None


class UpdateByBlock(WeightUpdate):
    """Optimizer step block by block. technique: says when a block is updated, whose gradient only the passes of the
    last sweep leave final."""

    def __init__(self, build: Build, calls: BlockCalls | None, *, technique: Update) -> None:
        assert calls is not None
        self._parts = calls.parts
        self._offloaded = OffloadedState(build, calls.parts, calls.transfers)
        super().__init__(build)
        calls.update = self
        self._technique = technique
        self._learning_rate = build.recipe.learning_rate
        self._draws = technique.deferred and build.recipe.weight_rounding == "stochastic"
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._finite: list[_ScaledGradients] = []
        self._final: set[int] = set()
        self._seen: set[int] = set()  # in this step
        self._pending: _PendingUpdate | None = None
        self._calls = calls
        self._state_dict_hooks = StateDictHooks(weakref.ref(self))
        self._state_dict_hooks.register(build.model)

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate

    def fetch_gradients(self, part: int, next_part: int | None) -> None:
        self._offloaded.fetch_gradients(part, next_part)

    def store_gradients(self, part: int, final: bool) -> None:
        with active_watch().working_on(self._parts.modules[part]):
            self._offloaded.fetch_gradients(part, None)  # of a part that no pass of this sweep came to
            if final:
                self._final.add(part)
                self._measure(self._parts.parameters[part])
            self._offloaded.store_gradients(part, final, offload=not self._technique.in_backward)
        if final and self._technique.in_backward:
            self._pending = _PendingUpdate(self._learning_rate, None, {part}, None)
            self._update_parts([part], part - 1 if 0 < part < len(self._parts.blocks) else None)

    def _measure(self, parameters: Sequence[nn.Parameter]) -> None:
        """Unscale gradients that are complete, and take their norms."""
        learned = [p for p in parameters if p.grad is not None]
        if learned and self._scaler is not None:
            self._finite.append(_ScaledGradients(learned))
            self._scaler.unscale_(self._finite[-1])  # type: ignore[arg-type]
        if learned and (self._max_norm or self._scaler is not None):
            norms = torch._foreach_norm([p.grad for p in learned if p.grad is not None])
            self._norms.update(zip(learned, norms, strict=True))

    def __call__(self) -> Tensor | None:
        try:
            self._complete_gradients()
        except BaseException:
            self.abandon()
            raise
        norm = self._norm()
        if self._technique.in_backward:
            return norm
        if not self._are_finite():
            self._offloaded.drop_gradients()
            return norm
        seed = int(torch.randint(1 << 62, ())) if self._draws else None
        self._pending = _PendingUpdate(self._learning_rate, norm, {*range(len(self._parts.modules))}, seed)
        self._update_parts(self._parts.behind_blocks)
        self._offloaded.finish_updates()
        if not self._technique.deferred:
            self._update_all()
        return norm

    def _complete_gradients(self) -> None:
        """Complete gradients of every part, after what still waits of an earlier update."""
        self._refuse_unseen_gradients()
        left = {*self._pending.parts} if self._pending is not None else set()  # no pass of this step came to them
        for parts in {*range(len(self._parts.modules))} - self._final - left, left:
            for part in sorted(parts):
                self.store_gradients(part, final=True)
            self._update_all()
        self._final.clear()
        self._seen.clear()
        self._offloaded.finish_updates()

    def _refuse_unseen_gradients(self) -> None:
        """Raise ModelError where a block has gradients and was never called, so that its weights are an update behind;
        and where more gradients came than those that were complete."""
        for part, parameters in enumerate(self._parts.parameters):
            unseen = part < len(self._parts.blocks) and part not in self._seen
            if (unseen or part in self._final) and any(p.grad is not None for p in parameters):
                name = f"block {part + 1}" if part < len(self._parts.blocks) else "the embeddings or the head"
                raise ModelError(f"update: the model uses {name} otherwise than by calling it in its place, and what "
                                 f"works block by block cannot follow; write {WITHOUT_BLOCKS}")

    def make_ready(self, part: int, next_part: int | None) -> None:
        self._seen.add(part)
        self._offloaded.fetch_weights(part, next_part)
        self._update(part, next_part)

    def release(self, part: int) -> None:
        self._offloaded.release_weights(part)

    def _update(self, part: int, next_part: int | None) -> None:
        """Apply what a part waits for; its weights are on the device. next_part: the part that is expected next."""
        if self._pending is None or part not in self._pending.parts:
            return
        following = next_part if next_part in self._pending.parts or self._technique.in_backward else None
        with (self._calls.around_updates(), active_watch().working_on(self._parts.modules[part], Phase.OPTIMIZER),
              self._offloaded.updating(part, following, self.optimizer), self._own_random_numbers(part)):
            self._apply(part)
        if not self._pending.parts:
            self._pending = None
            if not self._technique.in_backward:
                self._offloaded.finish_updates()

    def abandon(self) -> None:
        self._calls.end_all()
        self._final.clear()
        self._seen.clear()
        self._norms.clear()
        self._finite.clear()
        self.forget_scaling()
        self._offloaded.release_gradients()
        self._update_all()  # what waits is an earlier step's
        self._offloaded.abandon_gradients()

    def flush(self) -> None:
        self._update_all()
        self._offloaded.wait_on_host()

    def close(self) -> None:
        self.flush()
        self._state_dict_hooks.remove()
        self._calls.close()
        self._offloaded.close(self._build.model)

    def flush_between_steps(self) -> None:
        """`flush`; nothing while a part is in use, whose place another would take."""
        if not self._calls.in_use:
            self.flush()

    def reload(self) -> None:
        """Weights or states were written where they wait, or the states are new."""
        self._offloaded.reload(self.optimizer)

    def _update_all(self) -> None:
        """Apply everything that waits: before anyone else reads weights or states."""
        if self._pending is not None:
            self._update_parts(sorted(self._pending.parts))

    def _update_parts(self, waiting: Sequence[int], then: int | None = None) -> None:
        for part, next_part in zip(waiting, [*waiting, then][1:], strict=True):
            with active_watch().working_on(self._parts.modules[part]):
                try:
                    self._offloaded.fetch_learned(part, next_part)
                    self._update(part, next_part)
                finally:
                    self.release(part)

    def make_states(self, *, late: bool = False) -> None:
        waiting = len(self._parts.blocks) if self._technique.deferred else 0
        for part, module in enumerate(self._parts.modules[: waiting if late else None]):
            with active_watch().working_on(module):
                self._offloaded.fetch_learned(part, None)
                self._offloaded.store_gradients(part, final=True)  # there are none: what waits is of no use
                with self._offloaded.updating(part, None, self.optimizer):
                    make_states(self.optimizer, self._parts.parameters[part])
                self._offloaded.release_weights(part)
        self._offloaded.finish_updates()
        self._offloaded.wait_on_host()

    def new_optimizer(self) -> None:
        self._offloaded.forget_states()
        super().new_optimizer()

    def load(self, folder: Path, meta: dict[str, Any]) -> None:
        super().load(folder, meta)
        self._pending = None  # what waited was for the weights before
        self.reload()

    def _apply(self, part: int) -> None:
        """Step the optimizer over a part's parameters alone: others may have gradients already."""
        assert self._pending is not None
        parameters = self._parts.parameters[part]
        if self._max_norm and self._pending.norm is not None:
            clip_grads_with_norm_(parameters, self._max_norm, self._pending.norm)
        set_learning_rate(self.optimizer, self._pending.learning_rate)
        groups, own = self.optimizer.param_groups, {*parameters}
        every = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [parameter for parameter in group["params"] if parameter in own]
            self._pending.parts.discard(part)  # no sooner: until here a failure leaves it as it was
            with torch.autocast(self._build.torch_device.type, enabled=False):  # a block may be entered inside it
                self.optimizer.step()
        finally:
            for group, whole in zip(groups, every, strict=True):
                group["params"] = whole
        for parameter in parameters:
            parameter.grad = None

    @contextmanager
    def _own_random_numbers(self, part: int) -> Iterator[None]:
        """Random numbers of a part's own inside: the same ones whenever its turn comes, whatever is drawn meanwhile,
        so that a run that is stopped goes on as if it had not been."""
        assert self._pending is not None
        if self._pending.seed is None:
            yield
            return
        device = self._build.torch_device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.default_generator.manual_seed(self._pending.seed + part)
            if device.type == "cuda":
                torch.cuda.manual_seed(self._pending.seed + part)
            yield

    def _norm(self) -> Tensor | None:
        """The norm of all gradients, from those of each parameter: the sum runs in the order of torch's own."""
        if not self._norms:
            return None
        by_format: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._build.model.parameters():
            if parameter in self._norms:
                by_format.setdefault(parameter.dtype, []).append(self._norms.pop(parameter))
        total: Tensor = torch.linalg.vector_norm(torch.stack([n for norms in by_format.values() for n in norms]))
        return total

    def _are_finite(self) -> bool:
        """Whether loss scaling lets this update pass."""
        if self._scaler is None:
            return True
        found, self._finite = self._finite, []
        for gradients in found:
            self._scaler.step(gradients)  # type: ignore[arg-type]
        self._scaler.update()
        return not found or not torch.stack([gradients.overflows for gradients in found]).any().item()


class _ScaledGradients:
    """Some parameters as a loss scaler sees an optimizer: it unscales their gradients, and says before a step whether
    any was not finite.

    overflows: more than 0 if so. found_inf: the scaler's word for it, on the device, where reading it costs no wait.
    """

    _step_supports_amp_scaling = True  # of the scaler's: else it reads each one itself
    found_inf: Tensor

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(parameters)}]

    def step(self) -> None:
        self.overflows = self.found_inf

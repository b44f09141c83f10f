"""The losses of a mixture of experts' routers, added to the gradients where the routers are, and what is logged.

Of each router, over the T tokens of a global batch that are no padding, with k of E experts each:

    balance loss = E * sum over experts e of f_e * P_e      (1 where all experts are used alike, E / k at worst)
        f_e = share of the T * k choices that fell on e, without a gradient;  P_e = mean probability of e
    z-loss       = mean over tokens of logsumexp(logits)^2                                     (arXiv 2202.08906)

and of a model the mean over its routers. Their gradients are put in by an identity function on a router's output,
which is in the graph wherever the experts are: no loss has to leave a block, and checkpointing recomputes it as it does
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from tightfit.backends.base import Metric
from tightfit.backends.pytorch.batch import TensorBatch, TensorGlobalBatch
from tightfit.backends.pytorch.experts import Routing
from tightfit.backends.pytorch.experts.functions import function_names
from tightfit.backends.pytorch.pending_step import Metrics
from tightfit.backends.pytorch.switches import as_loaded, turn_off
from tightfit.errors import Refused
from tightfit.model_facts import experts_per_token

if TYPE_CHECKING:
    from tightfit.backends.pytorch.build import Build

COEFFICIENTS = ("router_aux_loss_coef", "router_z_loss_coef")
"""Fields of a recipe, and of models' configurations."""
ALIGNED_FLOATS = 64
"""Numbers of fp32 in 256 bytes."""


class Router(NamedTuple):
    """A module that chooses experts. logits_index: of the logits in its output; None where they are
    all of it. chosen: experts of a token."""

    module: nn.Module
    logits_index: int | None
    experts: int
    chosen: int


def find_routers(model: nn.Module) -> tuple[Router, ...]:
    """The model's routers, as transformers names them (`_can_record_outputs`): those whose output is logits, or begins
    with logits, scores and indices. Each sends tokens to as many experts."""
    found: dict[nn.Module, Router] = {}
    for part in model.modules():
        if not isinstance(part, transformers.PreTrainedModel):
            continue
        recorders = (part._can_record_outputs or {}).get("router_logits", ())
        for recorder in recorders if isinstance(recorders, list | tuple) else [recorders]:
            target, where = getattr(recorder, "target_class", None), getattr(recorder, "layer_name", None)
            for name, module in part.named_modules():
                if target is not None and isinstance(module, target) and (where is None or where in name):
                    router = _router(module, recorder.index, part.config)
                    if router is not None:
                        found[module] = router
    return tuple(found.values())


def _router(module: nn.Module, logits_index: int, config: Any) -> Router | None:
    if type(module) is nn.Linear:
        return Router(module, None, module.out_features, experts_per_token(config))
    experts, chosen = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    if logits_index != 0 or not isinstance(experts, int) or not isinstance(chosen, int):
        return None
    return Router(module, logits_index, experts, chosen)


class RouterLosses(Routing):
    """A model's routers while its steps run.

    exact: whether f_e is that of the whole global batch, as where all micro-batches pass a router before the first
        one's backward pass does; else it is a micro-batch's own.
    counts_whole_batch: whether it is summed up by several of them.
    token_mask: 1 for tokens of the micro-batch at hand, 0 for padding, (tokens,); None where nothing is padded.
    """

    def __init__(self, build: Build, routers: tuple[Router, ...]) -> None:
        self._build = build
        self.balance_coefficient, self.z_coefficient = (coefficient(build, name) for name in COEFFICIENTS)
        self.compiled, self.recording = build.recipe.compiled, False
        self.exact, self.counts_whole_batch = True, False
        self.experts, self.chosen = routers[0].experts, routers[0].chosen
        self.tokens = 1
        self.factor, self.recorded = (torch.ones((), device=build.torch_device) for _ in "fr")
        self.token_mask: Tensor | None = None
        self._token_masks: dict[int, Tensor] = {}
        # By router: choices of each expert, summed probabilities of each, summed z-loss and balance loss; rows begin
        # where a compiler expects tensors to.
        width = -(-(2 * self.experts + 2) // ALIGNED_FLOATS) * ALIGNED_FLOATS
        self._figures = torch.zeros(len(routers), width, device=build.torch_device)
        self._hooks = []
        for router, row in zip(routers, self._figures, strict=True):
            hook: Any = _Hook(self, router, row)
            # What others add to the choices after a router's forward pass is no part of a compiled backward pass.
            hook = torch.compiler.disable(hook) if self.compiled and build.calls_blocks else hook
            self._hooks.append(router.module.register_forward_hook(hook))

    def begin(self, global_batch: TensorGlobalBatch, scale: Callable[[Tensor], Tensor]) -> None:
        build, count = self._build, len(global_batch.micro_batches)
        accumulation = build.recipe.accumulation
        self.counts_whole_batch = (count > 1 and accumulation != "auto" and accumulation.by_block
                                   and accumulation.sweep_of(count) >= count)
        self.exact = (count == 1 or self.counts_whole_batch) and build.world.size == 1
        self.tokens = global_batch.tokens
        one = torch.full((), build.world.size, dtype=torch.float32, device=build.torch_device)  # gradients are averaged
        self.factor = scale(one) / (len(self._hooks) * self.tokens)
        self._token_masks.clear()
        self._figures.zero_()

    def enter(self, number: int, batch: TensorBatch | None = None) -> None:
        if batch is not None and batch.padding is not None:
            self._token_masks[number] = batch.padding.flatten().float()
        self.token_mask = self._token_masks.get(number)

    def record(self, recording: bool) -> None:
        if self.compiled and recording != self.recording:
            self.recorded.fill_(float(recording))  # one compiled graph for both
        self.recording = recording

    def function_names(self, ops: Iterable[str]) -> tuple[str, ...]:
        return function_names(self._build.model, ops)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def counts(self) -> Tensor:
        """The choices of the global batch so far: (routers, experts)."""
        return self._figures[:, : self.experts]

    def report(self) -> tuple[tuple[Tensor, ...], Metrics | None]:
        """The balance loss, the z-loss and the fullest expert's share over the mean one: means over routers, but the
        largest for the last."""
        self._build.world.all_reduce_(self._figures)
        shares = self.counts() / (self.tokens * self.chosen)
        _, probabilities, sums, _ = self._figures.split(
            [self.experts, self.experts, 2, self._figures.shape[1] - 2 * self.experts - 2], dim=1)
        balance = self.experts * (shares * probabilities).sum(1) if self.exact else sums[:, 1]
        figures = balance.mean() / self.tokens, sums[:, 0].mean() / self.tokens, self.experts * shares.max()
        return figures, partial(_metrics, self.tokens, self.exact)


def _metrics(tokens: int, exact: bool, figures: list[float]) -> dict[str, Metric]:
    balance, z, load = figures
    return {
        "balance_loss": Metric(balance * tokens, tokens, adds_up=exact),
        "router_z_loss": Metric(z * tokens, tokens),
        "expert_load": Metric(load, 1, adds_up=False),
    }


class _Hook:
    """A forward hook of one router. row: its figures."""

    def __init__(self, routing: RouterLosses, router: Router, row: Tensor) -> None:
        self.routing, self.router, self.row = routing, router, row

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not module.training:
            return None
        if self.router.logits_index is None:
            chosen = output.detach().topk(self.router.chosen, dim=-1).indices
            return _WithLosses.apply(output, output, chosen, self)  # type: ignore[no-untyped-call]
        logits, scores, chosen = output
        return logits, _WithLosses.apply(scores, logits, chosen, self), chosen  # type: ignore[no-untyped-call]

    def record(self, logits: Tensor, counts: Tensor) -> None:
        """Add a micro-batch's choices and losses. logits: (tokens, experts). counts: (experts,)."""
        routing, logits = self.routing, logits.float()
        probabilities, z = logits.softmax(-1), logits.logsumexp(-1).square()
        mask = routing.token_mask
        if mask is not None:
            probabilities, z = probabilities * mask[:, None], z * mask
        summed = probabilities.sum(0)
        balance = routing.experts * (_shares(counts) * summed).sum()
        found = torch.cat((counts, summed, z.sum()[None], balance[None]))
        self.row[: found.shape[0]].add_(found * routing.recorded)

    def gradient(self, logits: Tensor, counts: Tensor, token_mask: Tensor | None) -> Tensor:
        """The gradient of both losses, times their coefficients, by a router's logits."""
        routing, wide = self.routing, logits.float()
        probabilities = wide.softmax(-1)
        shares = _shares(self.row[: routing.experts] if routing.counts_whole_batch else counts)
        slope = shares * (routing.balance_coefficient * routing.experts)
        inner = slope - (probabilities * slope).sum(-1, keepdim=True)
        if routing.z_coefficient:
            inner = inner + wide.logsumexp(-1, keepdim=True) * (2 * routing.z_coefficient)
        gradient = probabilities * inner * routing.factor
        return (gradient if token_mask is None else gradient * token_mask[:, None]).to(logits.dtype)


def _shares(counts: Tensor) -> Tensor:
    return counts / counts.sum().clamp(min=1)


class _WithLosses(torch.autograd.Function):
    """The identity on what a router hands on; backward, the losses' gradient goes to its logits."""

    @staticmethod
    def forward(ctx: Any, handed_on: Tensor, logits: Tensor, chosen: Tensor, hook: _Hook) -> Tensor:
        mask, flat = hook.routing.token_mask, chosen.reshape(-1)
        weights = torch.ones_like(flat, dtype=torch.float32) if mask is None \
            else mask[:, None].expand_as(chosen).reshape(-1)
        counts = logits.new_zeros(logits.shape[-1], dtype=torch.float32).scatter_add_(0, flat, weights)
        if hook.routing.recording or hook.routing.compiled:
            hook.record(logits, counts)
        ctx.save_for_backward(logits, counts, mask)
        ctx.hook = hook
        return handed_on.view_as(handed_on)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, counts, mask = ctx.saved_tensors
        return gradients[0], ctx.hook.gradient(logits, counts, mask), None, None


def routing_of(build: Build) -> Routing:
    """The routing of a build's steps from now on. Raises Refused where its recipe asks for a loss of routers, and none
    are known."""
    turn_off(build.model, "output_router_logits")  # or the model would make a balance loss of its own beside ours
    if routers := _known_routers(build.model):
        return RouterLosses(build, routers)
    for name in COEFFICIENTS:
        if getattr(build.recipe, name):
            raise Refused(f"{name}: the routers of {type(build.model).__name__} are not known, and it would have no "
                          f"effect; leave it out, or write {name}=0")
    return Routing()


def _known_routers(model: nn.Module) -> tuple[Router, ...]:
    """The model's routers where they are all alike, as their losses want them."""
    routers = find_routers(model)
    return routers if len({(each.experts, each.chosen) for each in routers}) == 1 and routers[0].chosen else ()


def balance_note(build: Build) -> tuple[str, ...]:
    """Note on a balance loss that comes from the model's configuration alone, where the Hugging Face Trainer adds none.
    """
    name, _ = COEFFICIENTS
    value, parts = coefficient(build, name), build.model.modules()
    with as_loaded(build.model):
        added = any(isinstance(part, transformers.PreTrainedModel)
                    and getattr(part.config, "output_router_logits", False) for part in parts)
    if getattr(build.recipe, name) is not None or added or not value or not _known_routers(build.model):
        return ()
    return (f"{name}: the balance loss of the experts' routers is added at the model configuration's {value:g}, though "
            f"its output_router_logits is false; write {name}=0 to leave it out, as the Hugging Face Trainer does",)


def coefficient(build: Build, name: str) -> float:
    """A loss's coefficient: the recipe's, or the model configuration's."""
    given = getattr(build.recipe, name)
    if given is not None:
        return float(given)
    configs: Iterator[Any] = (part.config for part in build.model.modules()
                              if isinstance(part, transformers.PreTrainedModel))
    return next((float(getattr(config, name)) for config in configs if getattr(config, name, None)), 0.0)

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

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from tightfit.backends.base import Metric
from tightfit.backends.pytorch.batch import TensorBatch, TensorGlobalBatch
from tightfit.backends.pytorch.experts import experts_per_token
from tightfit.backends.pytorch.techniques.experts.functions import function_names
from tightfit.errors import Refused

if TYPE_CHECKING:
    from tightfit.backends.pytorch.build import Build

COEFFICIENTS = ("router_aux_loss_coef", "router_z_loss_coef")
"""Fields of a recipe, and of models' configurations."""


class Router(NamedTuple):
    """A module that chooses experts. place: that of the logits in its output; None where they are all of it.
    chosen: experts of a token."""

    module: nn.Module
    place: int | None
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


def _router(module: nn.Module, index: int, config: Any) -> Router | None:
    if isinstance(module, nn.Linear):
        return Router(module, None, module.out_features, experts_per_token(config))
    experts, chosen = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    known = isinstance(experts, int) and isinstance(chosen, int) and index == 0
    return Router(module, index, experts, chosen) if known else None  # type: ignore[arg-type]


class Routing:
    """A model's routers while its steps run. `begin` a global batch, then `enter` each micro-batch before its forward
    pass, and `attend` one that others came between; `metrics` is for the step's end.

    recording: whether a forward pass runs that is no recomputation.
    exact: whether f_e is that of the whole global batch, as where all micro-batches pass a router before the first
        one's backward pass does; else it is a micro-batch's own.
    """

    def __init__(self, build: Build, routers: tuple[Router, ...]) -> None:
        self._build, self._routers = build, routers
        self.balance_coefficient, self.z_coefficient = (coefficient(build, name) for name in COEFFICIENTS)
        self.recording, self.exact = False, True
        self.tokens, self.scale = 1, torch.ones((), device=build.torch_device)
        first = routers[0]
        self.experts, self.chosen = first.experts, first.chosen
        rows = len(routers)
        # By router: choices of each expert, summed probabilities of each, summed z-loss, summed balance loss.
        self.counts, self.probabilities = (torch.zeros(rows, first.experts, device=build.torch_device) for _ in "cp")
        self.z, self.balance = (torch.zeros(rows, device=build.torch_device) for _ in "zb")
        self._real: dict[int, Tensor] = {}
        self.real: Tensor | None = None
        self._hooks = [router.module.register_forward_hook(self._hook(number, router))
                       for number, router in enumerate(routers)]

    def begin(self, global_batch: TensorGlobalBatch, scale: Tensor) -> None:
        """A global batch's passes follow. scale: the loss's, for fp16, times the processes that average gradients."""
        count, sweep_of = len(global_batch.micro_batches), getattr(self._build.accumulation, "sweep_of", None)
        together = 1 if sweep_of is None else sweep_of(count)
        self.exact = together >= count and self._build.world.size == 1
        self.tokens, self.scale = global_batch.tokens, scale
        self._real.clear()
        for figures in (self.counts, self.probabilities, self.z, self.balance):
            figures.zero_()

    def enter(self, number: int, batch: TensorBatch) -> None:
        """The micro-batch of that number goes forward."""
        if batch.padding is not None:
            self._real[number] = batch.padding.flatten().float()
        self.attend(number)

    def attend(self, number: int) -> None:
        """What runs now is the micro-batch of that number."""
        self.real = self._real.get(number)

    def function_names(self, ops: Iterable[str]) -> tuple[str, ...]:
        """Names of the functions that computed the experts in a forward pass that ran these ops."""
        return function_names(self._build.model, ops)

    def close(self) -> None:
        """Let the model be as it was."""
        for hook in self._hooks:
            hook.remove()

    def figures(self) -> tuple[Tensor, ...]:
        """The balance loss, the z-loss and the fullest expert's share over the mean one, of the whole global batch:
        means over routers, but the largest for the last."""
        for figures in (self.counts, self.probabilities, self.z, self.balance):
            self._build.world.add_up(figures)
        shares = self.counts / (self.tokens * self.chosen)
        balance = self.balance
        if self.exact:
            balance = self.experts * (shares * self.probabilities).sum(-1)
        return balance.mean() / self.tokens, self.z.mean() / self.tokens, self.experts * shares.max()

    def metrics(self, figures: list[float]) -> dict[str, Metric]:
        """What `figures` came to, by name."""
        balance, z, load = figures
        return {
            "balance_loss": Metric(balance * self.tokens, self.tokens, adds_up=self.exact),
            "router_z_loss": Metric(z * self.tokens, self.tokens),
            "expert_load": Metric(load, 1, adds_up=False),
        }

    def _hook(self, number: int, router: Router) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            if not module.training:
                return None
            if router.place is None:
                chosen = output.detach().topk(router.chosen, dim=-1).indices
                return _WithLosses.apply(output, output, chosen, self, number)  # type: ignore[no-untyped-call]
            logits, scores, chosen = output
            return logits, _WithLosses.apply(scores, logits, chosen, self, number), chosen  # type: ignore[no-untyped-call]

        return hook

    def record(self, number: int, logits: Tensor, counts: Tensor) -> None:
        """Add a micro-batch's choices and losses. logits: (tokens, experts). counts: (experts,)."""
        logits, real = logits.float(), self.real
        probabilities, z = logits.softmax(-1), logits.logsumexp(-1).square()
        if real is not None:
            probabilities, z = probabilities * real[:, None], z * real
        summed = probabilities.sum(0)
        self.counts[number] += counts
        self.probabilities[number] += summed
        self.z[number] += z.sum()
        if not self.exact:
            self.balance[number] += self.experts * (self._shares(counts) * summed).sum()

    def gradient(self, number: int, logits: Tensor, counts: Tensor, real: Tensor | None) -> Tensor:
        """The gradient of both losses, times their coefficients, by a router's logits."""
        wide = logits.float()
        probabilities = wide.softmax(-1)
        mean = len(self._routers) * self.tokens
        shares = self._shares(self.counts[number] if self.exact else counts)
        slope = shares * (self.balance_coefficient * self.experts / mean)
        inner = slope - (probabilities * slope).sum(-1, keepdim=True)
        if self.z_coefficient:
            inner = inner + wide.logsumexp(-1, keepdim=True) * (2 * self.z_coefficient / mean)
        gradient = probabilities * inner * self.scale
        return (gradient if real is None else gradient * real[:, None]).to(logits.dtype)

    def _shares(self, counts: Tensor) -> Tensor:
        return counts / counts.sum().clamp(min=1)


class _WithLosses(torch.autograd.Function):
    """The identity on what a router hands on; backward, the losses' gradient goes to its logits."""

    @staticmethod
    def forward(
        ctx: Any, handed_on: Tensor, logits: Tensor, chosen: Tensor, routing: Routing, number: int
    ) -> Tensor:
        real, flat = routing.real, chosen.reshape(-1)
        weights = torch.ones_like(flat, dtype=torch.float32) if real is None \
            else real[:, None].expand_as(chosen).reshape(-1)
        counts = logits.new_zeros(logits.shape[-1], dtype=torch.float32).scatter_add_(0, flat, weights)
        if routing.recording:
            routing.record(number, logits, counts)
        ctx.save_for_backward(logits, counts, real)
        ctx.routing, ctx.number = routing, number
        return handed_on.view_as(handed_on)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, counts, real = ctx.saved_tensors
        return gradients[0], ctx.routing.gradient(ctx.number, logits, counts, real), None, None, None


def routing_of(build: Build) -> Routing | None:
    """The routing of a build's steps; None where the model has no routers that are known. Raises Refused where a recipe
    asks for a loss of such."""
    for part in build.model.modules():
        if isinstance(part, transformers.PreTrainedModel) and getattr(part.config, "output_router_logits", False):
            part.config.output_router_logits = False  # or the model would make a balance loss of its own beside ours
    routers = find_routers(build.model)
    if len({(router.experts, router.chosen) for router in routers}) == 1 and routers[0].chosen:
        return Routing(build, routers)
    for name in COEFFICIENTS:
        if getattr(build.recipe, name):
            raise Refused(f"{name}: the routers of {type(build.model).__name__} are not known, and it would have no "
                          f"effect; leave it out, or write {name}=0")
    return None


def coefficient(build: Build, name: str) -> float:
    """A loss's coefficient: the recipe's, or the model configuration's."""
    given = getattr(build.recipe, name)
    if given is not None:
        return float(given)
    configs: Iterator[Any] = (part.config for part in build.model.modules()
                              if isinstance(part, transformers.PreTrainedModel))
    return next((float(getattr(config, name)) for config in configs if getattr(config, name, None)), 0.0)

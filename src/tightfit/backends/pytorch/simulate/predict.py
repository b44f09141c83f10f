"""Reading the training step on fake tensors: what it would allocate and run, on a device that need not be present.

The step is the one that training builds. It runs twice, for an optimizer makes its states in the first step; then a
held-out micro-batch, the writing of a checkpoint, and going on from one: those have peaks of their own.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tightfit.backends.pytorch import loops
from tightfit.backends.pytorch.assembly import assemble, made_on_host, require_changeable
from tightfit.backends.pytorch.batch import TensorGlobalBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.follow.alike_turns import alike_turns
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.models import stored_source
from tightfit.backends.pytorch.replaced import replaced
from tightfit.backends.pytorch.simulate.compiled.regions import Regions, compiling_for
from tightfit.backends.pytorch.simulate.data_dependent import answer
from tightfit.backends.pytorch.simulate.depth import Shorten
from tightfit.backends.pytorch.simulate.fake_global_batches import fake_global_batch, is_padded, micro_batch_groups
from tightfit.backends.pytorch.simulate.fake_world import fake_world, following_parts
from tightfit.backends.pytorch.simulate.target import PlanningMode, fake_tensors, scratch_of
from tightfit.backends.pytorch.simulate.trace_failure import explain_trace_failure
from tightfit.backends.pytorch.simulate.untraced import untraced
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.techniques.optimizer.state import load_state, state_tensors
from tightfit.devices import Device
from tightfit.garbage import gc_paused
from tightfit.recipe import Recipe
from tightfit.tasks import get_task
from tightfit.trace import Category, Phase, Trace
from tightfit.trace.events import Stack
from tightfit.trace.extension import extend

ON_HOST = torch.device("cpu")


SHALLOW, TEMPLATE, DEEPER = 4, 2, 2
"""Groups of blocks in the shallower of the two traces that stand for a deep model, and which of them is copied: one
with its like before it and a neighbour behind. Where that neighbour, as the last, works otherwise, or the second group
as the first (beside frozen weights the first block keeps no input), a group more is traced, up to DEEPER in all: at
once where there are several stacks, for the first gradient of an encoder's output is not added to any."""

FEWEST_GROUPS = 2 * SHALLOW + 2
"""From so many groups on, two shallow traces are quicker than a whole one."""


def predict(
    recipe: Recipe, device: Device, model: nn.Module | None = None, *, whole: bool = False, ends_apart: bool = False
) -> Trace:
    """Trace of the recipe's step on `device`: ops and allocations of two steps, of evaluation where data is held out
    for it and nothing is compiled, of saving and of resuming.

    recipe: resolved. model: a module of the caller's own, on any device; its weights are not read.
    whole: trace every block, also where few of them stand for the rest. ends_apart: trace the last micro-batch alone.
    No parameter is ever allocated. Raises Refused where a technique cannot serve, and ModelError, naming the module
    and the op, where a model cannot be traced.
    """
    drawn = model is None and stored_source(recipe) is None and not made_on_host(recipe)
    recipe = recipe.model_copy(update={"pretrained": False})  # a plan reads the configuration, never weights
    regions = Regions(device, scratch_of(device))
    with compiling_for(partial(PlanningMode, device)) if recipe.compiled else nullcontext():
        traced = partial(_traced, recipe, device, model, regions if recipe.compiled else None, ends_apart=ends_apart,
                         drawn=drawn)
        trace = _extend_depth(traced, whole or recipe.one_region,  # whose first and last blocks are fused with others
                              max(recipe.parallel.reach, 1 if recipe.offload == "auto" else recipe.offload.reach))
    trace.notes += regions.notes
    if recipe.compiled and recipe.data.holds_out:
        trace.notes.append("compile: evaluation, which keeps nothing for a backward pass, is not traced")
    first = trace.span("step 1").stop  # its update is timed in step 2, and can be most of a trace
    trace.ops = [op for op in trace.ops if op.tick >= first or op.phase is not Phase.OPTIMIZER]
    trace.untraced += untraced(recipe, device, trace)
    return trace


def _extend_depth(traced: Callable[..., Trace], whole: bool, reach: int) -> Trace:
    """The trace of a model at its full depth, extended from traces at a few blocks where these grow evenly.

    traced: makes the trace, of a model that a `Shorten` has cut where it is given one. whole: do not extend.
    reach: groups of blocks on either side that a group's work refers to.
    """
    if whole:
        return traced()
    start = SHALLOW + reach - 1
    first = Shorten(start, FEWEST_GROUPS, of_several=1)
    shallow = traced(first)
    if not first.stacks:
        return shallow
    for more in range(DEEPER):
        depth = first.keep + more + 1
        deeper = traced(Shorten(depth, FEWEST_GROUPS))
        for template in range(TEMPLATE, TEMPLATE + more + 1):
            stacks = [Stack(path=s.path, period=s.period, template=template, head=s.head, reach=reach)
                      for s in first.stacks]
            with gc_paused():  # the collector would go through a deep trace's ops again and again
                extended = extend(shallow, deeper, stacks, first.groups - depth + 1)
            if extended is not None:
                return extended
        shallow = deeper
    return traced()


def _traced(
    recipe: Recipe, device: Device, model: nn.Module | None, regions: Regions | None, shorten: Shorten | None = None, *,
    ends_apart: bool = False, drawn: bool = False,
) -> Trace:  # fmt: skip
    """regions: what is compiled, which may be so already; None where nothing is. drawn: whether the weights are made on
    the device, at random."""
    padded = is_padded(recipe, get_task(recipe.task))
    tracker = Tracker(scratch=scratch_of(device), answer=partial(answer, padded=padded))

    with ExitStack() as stack:
        world = None
        if recipe.parallel.shards:
            world = stack.enter_context(fake_world(recipe.parallel.process_count))
            stack.enter_context(following_parts(tracker))

        def change(build: Build) -> Build:
            build = build if shorten is None else shorten(build)
            build = build if world is None else replace(build, world=world)
            return build if regions is None else replace(build, compile_backend=regions.reporting_to(tracker))

        stack.enter_context(fake_tensors(device))  # garbage is collected where each phase begins, see `_TracedStep`
        own = None if model is None else fake_copy(model)
        with skip_weight_init():
            build = assemble(recipe, device, ON_HOST, own, change)
        if build.optimizer_factory is not None:  # what its library makes once a process, such as tables, is no step's
            build.optimizer()
        tracker.follow(build.model, _compiled_modules(build))
        stack.callback(tracker.unfollow)
        if drawn and (size := _tied_head(build.model)):
            tracker.memory.transient(size, "aten.empty", "", Phase.SETUP, tracker.memory.next())
        stack.enter_context(replaced(loops, "turns", partial(alike_turns, tracker)))
        stack.enter_context(tracker)
        stack.enter_context(build.process_settings())
        if device.kind == "cpu":
            stack.enter_context(_counted_random_states(tracker))
        stack.enter_context(explain_trace_failure(build, tracker))
        _run(build, tracker, ends_apart)
        trace = tracker.trace("predicted")  # here, for what is freed from now on is no part of it
    trace.notes += build.notes
    return trace


def _tied_head(model: nn.Module) -> int:
    """Bytes of the weight that a transformers model makes for its output, and lets go as it ties it to the input's:
    the device's allocator keeps the block, and what it serves decides where others go."""
    if not isinstance(model, PreTrainedModel):
        return 0
    made = model.get_output_embeddings()
    if made is None:  # such a model may have no input embeddings to ask for either: a convolution's raise
        return 0
    used = model.get_input_embeddings()
    tied = getattr(made, "weight", None) is getattr(used, "weight", used)
    return int(made.weight.nbytes) if tied else 0


def _counted_random_states(tracker: Tracker) -> AbstractContextManager[None]:
    """The tracker counts every copy of the host's random state that checkpointing keeps, which the generator makes
    without asking the dispatcher: host memory, which is the device's on the CPU. One for each region in the forward
    pass, to recompute with, and one while it is recomputed."""
    take = torch.get_rng_state

    def counted() -> torch.Tensor:
        state = take()
        tracker.mark(state, Category.OTHER, from_birth=True)
        return state

    return replaced(torch, "get_rng_state", counted)


def skip_weight_init() -> AbstractContextManager[None]:
    """Context in which transformers' models draw no initial weights: some draws read values, and fake tensors have
    none."""
    return replaced(PreTrainedModel, "initialize_weights", lambda model: None)


def fake_copy(model: nn.Module) -> nn.Module:
    """A copy of a module whose weights are fake tensors on the CPU; call it inside a fake mode. Ties are kept."""
    require_changeable(model)
    copies: dict[int, Any] = {}
    held = (value for module in model.modules() for value in vars(module).values())  # such as a computed weight
    for tensor in [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, held)]:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    return copy.deepcopy(model, copies)


def _compiled_modules(build: Build) -> list[nn.Module]:
    """The modules that the recipe compiles: inside them nothing is seen but the region."""
    if build.compile_backend is None:
        return []
    if build.recipe.one_region:
        return [build.model]
    return [*build.blocks]


def _run(build: Build, tracker: Tracker, ends_apart: bool) -> None:
    step = _TracedStep(build, tracker)
    groups = micro_batch_groups(build.recipe, ends_apart)
    # The optimizer makes its states in the first step. There one micro-batch will do: the others' peaks are those of
    # the second step, less the states.
    if build.calls_blocks:
        # Saving and going on from a checkpoint are updates block by block, as a step's.
        with tracker.span("resume"):
            tracker.phase = Phase.RESUME
            step.step.update.make_states(late=True)
    for number, taken in ((1, groups[:1]), (2, groups)):
        with tracker.span(f"step {number}", step=number):
            step.take(number, taken)
    if build.recipe.data.holds_out and not build.recipe.compiled:  # evaluation is compiled a second time
        with tracker.span("evaluation"):
            tracker.phase = Phase.EVALUATION
            step.step.evaluate([step.global_batch([groups[0][0]])])
    if not build.calls_blocks:
        with tracker.span("save"):
            tracker.phase = Phase.SAVE
            step.step.is_finite()
        with tracker.span("resume"):
            tracker.phase = Phase.RESUME
            step.resume()


class _TracedStep:
    """A step that reports its phases, global batch and optimizer states to the tracker."""

    def __init__(self, build: Build, tracker: Tracker) -> None:
        self.build = build
        self.tracker = tracker
        self.step = Step(build, watch=self._enter, inspect=False)
        self._phase = ExitStack()
        self._number = 0
        self._times: list[int] = []

    def global_batch(self, sizes: list[int]) -> TensorGlobalBatch:
        return fake_global_batch(self.build, sizes, self._placed)

    def take(self, number: int, groups: list[tuple[int, int]]) -> None:
        """One step over micro-batches given as their sizes, each with how often it runs in a row."""
        gc.collect()
        gc.freeze()  # what there is between steps lives on: collecting within one need not go through it
        self._number, self._times = number, [times for _, times in groups]
        self.step(self.global_batch([size for size, _ in groups]), self.build.recipe.learning_rate)
        self._phase.close()
        self._mark_states()

    def resume(self) -> None:
        """Put saved states into a new optimizer, as going on from a checkpoint does."""
        with nullcontext() if self.build.device.kind == "cpu" else self.tracker.paused():  # the host's memory
            found, meta = state_tensors(self.step.optimizer, self.build.model)
            saved = {name: torch.empty_like(tensor) for name, tensor in found.items()}
        del found
        self.step.optimizer.state.clear()
        self.step.update.new_optimizer()
        load_state(self.step.optimizer, self.build.model, saved, meta, self.step.update.make_states)
        self._mark_states()

    def _mark_states(self) -> None:
        for parameter, states in self.step.optimizer.state.items():
            for value in states.values():
                if isinstance(value, torch.Tensor):
                    owner = self.tracker.owner(parameter)
                    self.tracker.mark(value, Category.OPTIMIZER, module=owner, from_birth=True)

    def _placed(self, tensor: torch.Tensor) -> None:
        """A tensor of the global batch: the device's own on CUDA, the data's on the CPU, which shares its memory."""
        if self.build.device.kind == "cpu":
            self.tracker.ignore(tensor)
        else:
            self.tracker.mark(tensor, Category.OTHER, from_birth=True)

    def _enter(self, phase: Phase) -> None:
        self._phase.close()
        gc.collect()
        times = 1
        if phase is not Phase.OPTIMIZER:
            times = self._times[0] if phase is Phase.FORWARD else self._times.pop(0)
        self._phase.enter_context(self.tracker.span(phase.value, step=self._number, times=times))
        self.tracker.phase = phase

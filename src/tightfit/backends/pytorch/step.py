"""The training step: one optimizer update from one global batch of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tightfit.backends.base import GlobalBatchSource, ParameterCounts
from tightfit.backends.pytorch.batch import TensorBatch, TensorGlobalBatch, tensor_global_batch
from tightfit.backends.pytorch.build import Build, Check
from tightfit.backends.pytorch.errors import determinism_guard, memory_guard, model_guard
from tightfit.backends.pytorch.experts import Routing, may_route, parameters_met
from tightfit.backends.pytorch.generation import generate
from tightfit.backends.pytorch.inspection import check_outputs, check_shapes, compile_seconds, op_names
from tightfit.backends.pytorch.models import parameter_count
from tightfit.backends.pytorch.pending_step import NOT_CLIPPED, PendingStep
from tightfit.backends.pytorch.sharding import full_tensor, is_on_drive, local_shard
from tightfit.backends.pytorch.techniques.attention.functions import kernel_names
from tightfit.backends.pytorch.techniques.loss.of_logits import Tally
from tightfit.backends.pytorch.world import lost_process_guard
from tightfit.metrics import Evaluation, Total
from tightfit.system import peak_process_memory
from tightfit.tasks import GlobalBatch
from tightfit.trace import Phase

if TYPE_CHECKING:
    from tightfit.backends.pytorch.techniques.by_block.block_calls import BlockCalls

Watch = Callable[[Phase], None]


class Step:
    """The one function that training runs, planning traces and profiling measures.

    The loss of a global batch is the sum over all its labels that count, divided by their number, whatever the sizes
    of its micro-batches: each micro-batch adds its own sum over the global batch's count.
    """

    def __init__(self, build: Build, *, watch: Watch | None = None, inspect: bool = True) -> None:
        """watch: called with each phase as it begins. inspect: whether to look into the first forward pass, and to
        raise what the model's own code raises as a ModelError; without it shapes alone are compared."""
        assert build.update_factory is not None
        self.build = build
        self.watch = watch
        self.blocks: BlockCalls | None = None
        if build.calls_blocks:
            from tightfit.backends.pytorch.techniques.by_block.block_calls import block_calls_of  # for these alone

            self.blocks = block_calls_of(build)
        self.update = build.update_factory(build, self.blocks)
        self.steps = 0
        self._highest = 0
        self._doing = "nothing yet"
        self._explains = self._to_inspect = inspect
        self.attention_kernels: tuple[str, ...] = ()
        self.experts_functions: tuple[str, ...] = ()
        self.routing = Routing()
        if may_route(build):
            from tightfit.backends.pytorch.experts.routing import routing_of  # for these alone

            self.routing = routing_of(build)
        self._loss: Tensor | None = None
        self._denominator = 1.0
        self._stepped, self._reporting = 0, False
        update = build.recipe.update
        self._deferred = update != "auto" and update.deferred  # updates within a step's passes are an earlier one's
        self._compiled_before = compile_seconds()
        build.model.train()
        if build.torch_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    @property
    def optimizer(self) -> Optimizer:
        return self.update.optimizer

    @property
    def parameters(self) -> ParameterCounts:
        model = self.build.model
        return ParameterCounts(parameter_count(model), parameters_met(model), parameter_count(model, trained=True))

    @property
    def compile_seconds(self) -> float:
        return compile_seconds() - self._compiled_before

    @property
    def intact(self) -> bool:
        begun, ended = self.update.step_calls()
        return begun == ended and not self._reporting and (self._deferred or ended == self._stepped)

    def held_memory(self) -> dict[str, int]:
        from tightfit.backends.pytorch.gpu_memory import held_memory

        return held_memory(self.build.model, self.optimizer)

    def __call__(self, global_batch: TensorGlobalBatch, learning_rate: float) -> PendingStep:
        self._stepped = self.update.step_calls()[1]
        with self._running("the step"):
            self.update.set_learning_rate(learning_rate)
            try:
                loss = self.accumulate(global_batch)
                self.enter(Phase.OPTIMIZER, "the optimizer step")
            except BaseException:
                self._loss = None
                self.update.abandon()
                raise
            self._reporting = self._deferred  # its own update begins, of which the rest would be applied later
            norm = self.update()
            self._reporting = True
            self.steps += 1
            every = self.build.recipe.empty_cache_steps
            if every and self.steps % every == 0 and self.build.torch_device.type == "cuda":
                torch.cuda.empty_cache()
            report = self._report(loss, norm, global_batch.count)
        self._reporting, self._stepped = False, self.update.step_calls()[1]
        return report

    def accumulate(self, global_batch: TensorGlobalBatch) -> Tensor:
        """Add every micro-batch's gradients; return the global batch's summed loss."""
        assert self.build.accumulation is not None
        if self._to_inspect:
            self.build.loss.check(self.build, global_batch.micro_batches[0].to(self.build.torch_device))
        # The count is of the whole global batch, and processes average their gradients.
        self._denominator = max(global_batch.count, 1) / self.build.world.size
        self.routing.begin(global_batch, self.update.scale)
        return self.build.accumulation(self.build, self, global_batch)

    def forward(self, global_batch: TensorGlobalBatch, number: int) -> Tensor:
        """The summed loss of a global batch's micro-batch, detached; the first is number 0."""
        self.enter(Phase.FORWARD, f"the forward pass of micro-batch {number + 1} of {len(global_batch.micro_batches)}")
        batch = global_batch.micro_batches[number].to(self.build.torch_device)
        self.routing.enter(number, batch)
        if self._to_inspect:
            self._to_inspect = False
            with op_names() as names:
                self._loss = self._training_loss(batch, check_outputs)
            self.attention_kernels = tuple(kernel_names(names()))
            self.experts_functions = self.routing.function_names(names())
        else:
            self._loss = self._training_loss(batch, None if self._explains else check_shapes)
        return self._loss.detach()

    def _training_loss(self, batch: TensorBatch, check: Check | None) -> Tensor:
        made = self.build.training_loss or self.build.loss_sum
        return made(batch, check)

    def select(self, number: int) -> None:
        """Say which micro-batch's pass goes on, where others came between."""
        self.routing.enter(number)

    def backward(self, global_batch: TensorGlobalBatch, number: int) -> None:
        """Add the gradients of the loss made last, over the global batch's denominator."""
        of = len(global_batch.micro_batches)
        self.enter(Phase.BACKWARD, f"the backward pass of micro-batch {number + 1} of {of}")
        assert self._loss is not None
        loss, self._loss = self._loss / self._denominator, None
        self.update.backward(loss)

    def _report(self, loss: Tensor, norm: Tensor | None, count: int) -> PendingStep:
        self.build.world.all_reduce_(loss)
        more, metrics = self.routing.report()
        if loss.device.type != "cuda":
            figures = [loss.item(), NOT_CLIPPED if norm is None else norm.item(), *(figure.item() for figure in more)]
            return PendingStep(figures, count, self.update.scaled, metrics)
        norm = torch.full_like(loss, NOT_CLIPPED) if norm is None else norm
        host = torch.empty(2 + len(more), dtype=torch.float64, pin_memory=True)
        host.copy_(torch.stack([figure.double() for figure in (loss, norm, *more)]), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return PendingStep(host, count, self.update.scaled, metrics, arrived)

    @torch.no_grad()
    def evaluate(self, global_batches: Iterable[GlobalBatch | TensorGlobalBatch]) -> Evaluation:
        """The sums over `global_batches`, in the evaluation's format, with nothing learned."""
        build, unchecked = self.build, self._to_inspect
        build.model.eval()
        try:
            self._flush("evaluation")
            with self._running("evaluation"), build.evaluation_weights():
                loss, count = torch.zeros((), dtype=torch.float64, device=build.torch_device), 0
                tally = Tally(build.torch_device, classes=build.task.predicts == "class")
                for global_batch in global_batches:
                    made = global_batch if isinstance(global_batch, TensorGlobalBatch) else tensor_global_batch(
                        global_batch)
                    for host_batch in made.micro_batches:
                        batch = host_batch.to(build.torch_device)
                        if unchecked:  # by a step before
                            build.loss.check(build, batch)
                            unchecked = False
                        loss += build.loss_sum(batch, None, tally)
                    count += global_batch.count
        finally:
            build.drop_gathered()
            build.model.train()
        if tally.by_class is not None:
            build.world.all_reduce_(tally.by_class)
        total, counted, correct = build.world.all_reduce_sum([loss.item(), count, tally.correct.item()])
        return Evaluation(loss=Total(total, int(counted)), correct=int(correct), by_class=tally.by_class)

    def global_batches(
        self, source: GlobalBatchSource, start: int, stop: int, workers: int | None = None
    ) -> Generator[TensorGlobalBatch]:
        assert self.build.global_batches is not None
        world = self.build.world
        if world.size == 1:
            yield from self.build.global_batches(source, start, stop, workers)
            return
        for part in self.build.global_batches(source.shard(world.rank, world.size), start, stop, workers):
            count, samples, tokens = world.all_reduce_sum([part.count, part.samples, part.tokens])
            yield replace(part, count=int(count), samples=int(samples), tokens=int(tokens))

    def generate(self, prompt: Sequence[int], new_tokens: int, temperature: float, seed: int) -> list[int]:
        self._flush("generating a sample")
        with self._running("generating a sample"):
            tokens = generate(self.build, prompt, new_tokens, temperature, seed)
        self.build.drop_gathered()
        return tokens

    def save(self, folder: Path) -> dict[str, Any]:
        self._flush("saving a checkpoint")
        with self._guarded("saving a checkpoint"):
            return {**self.update.save(folder), "steps": self.steps}

    def load(self, folder: Path, meta: dict[str, Any]) -> None:
        with self._guarded("restoring a checkpoint"):
            self.update.load(folder, meta)
        self.steps = meta["steps"]

    def export(self, folder: Path, classes: dict[int, str] | None) -> None:
        self._flush("writing the model")
        with self._guarded("writing the model"):
            self.build.save_model(self.build, folder, classes)

    def close(self) -> None:
        with self._guarded("giving the model back"):
            self.update.close()
            self.routing.close()

    def is_finite(self) -> bool:
        self._flush("looking for weights that are not finite")
        by_device: dict[torch.device, list[Tensor]] = {}  # some may wait in host memory
        finite = True
        with self._guarded("looking for weights that are not finite"):
            for parameter in self.build.model.parameters():
                if parameter.requires_grad and is_on_drive(parameter):
                    finite &= bool(full_tensor(parameter).isfinite().all())
                elif parameter.requires_grad and local_shard(parameter).numel():  # of a narrow one there may be no part
                    by_device.setdefault(parameter.device, []).append(local_shard(parameter).detach())
            for learned in by_device.values():
                norms = torch._foreach_norm(learned, ord=float("inf"))
                finite &= bool(torch.stack([norm.float() for norm in norms]).isfinite().all())
        return self.build.world.all_reduce_max(not finite) == 0

    def restart_peak(self) -> None:
        """Let the device's own account of its peak begin anew; `peak_memory` remembers what it was."""
        self._highest = self.peak_memory()
        torch.cuda.reset_peak_memory_stats()

    def peak_memory(self) -> int:
        if self.build.torch_device.type == "cuda":
            return max(self._highest, torch.cuda.max_memory_allocated())
        return peak_process_memory()

    def context_memory(self) -> int | None:
        if self.build.torch_device.type != "cuda":
            return None
        from tightfit.backends.pytorch.gpu_memory import gpu_memory

        return gpu_memory().context

    def enter(self, phase: Phase, doing: str) -> None:
        """Say what comes next."""
        self._doing = doing
        self.routing.record(phase is Phase.FORWARD)
        if self.watch is not None:
            self.watch(phase)

    @contextmanager
    def _running(self, doing: str) -> Iterator[None]:
        """Context of work that runs the model."""
        explained = model_guard(self.build.model, lambda: self._doing) if self._explains else nullcontext()
        with explained, self._guarded(doing):
            yield

    def _flush(self, doing: str) -> None:
        """Apply what an update still waits for, before `doing` reads weights."""
        with self._guarded(doing):
            self.update.flush()

    @contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        self._doing = doing
        with memory_guard(lambda: self._doing), lost_process_guard(), determinism_guard():
            yield

"""The training step as training runs it: the compiled update, and the state it takes from global batch to global
batch."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from tightfit.backends.base import GlobalBatchSource, ParameterCounts, StepResult
from tightfit.backends.jax.build import Build
from tightfit.backends.jax.checkpoints import load_state, read_weights, save_state, write_model
from tightfit.backends.jax.forward import logits
from tightfit.backends.jax.loading import ArrayGlobalBatch, global_batches, stack_for
from tightfit.backends.jax.network import Params
from tightfit.backends.jax.update import (
    Arrays,
    Metrics,
    State,
    abstract_state,
    eval_step,
    initial_state,
    jitted_step,
)
from tightfit.errors import ModelError, OutOfMemory
from tightfit.metrics import Evaluation, Total
from tightfit.system import peak_process_memory
from tightfit.tasks import IGNORE, GlobalBatch


@dataclass(frozen=True)
class PendingStep:
    """A step's figures, on their way from the device."""

    metrics: Metrics

    def ready(self) -> bool:
        return all(array.is_ready() for array in jax.tree.leaves(self.metrics))

    def read(self) -> StepResult:
        with memory_guard("the step"):
            found = jax.device_get(self.metrics)
        total, count = found["loss"]
        norm = found.get("grad_norm")
        return StepResult(loss=Total(float(total), int(count)), grad_norm=None if norm is None else float(norm))


class Step:
    """The step of a build, with the state that it takes along. Each shape of global batch is compiled once.

    called_at: when the last step was called, by time.perf_counter.
    """

    attention_kernels: tuple[str, ...] = ()
    """Always empty: what a compiled step calls is the compiler's."""
    experts_functions: tuple[str, ...] = ()
    """Always empty: no model here has experts."""

    def __init__(self, build: Build) -> None:
        def next_logits(params: Params, given: Arrays) -> jax.Array:
            return logits(build, params, {"input_ids": given["ids"]})[0, given["place"]]

        self.build = build
        self._functions = {
            "step": jitted_step(build),
            "evaluation": jax.jit(partial(eval_step, build), out_shardings=build.replicated),
            "sample": jax.jit(next_logits, out_shardings=build.replicated),
        }
        self._compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}
        self.compile_seconds = 0.0
        self.state = self._initial()
        self.called_at = 0.0
        self._taken = 0

    @property
    def parameters(self) -> ParameterCounts:
        return ParameterCounts(*3 * [self.build.network.parameter_count])

    intact = False
    """Arrays that an update was to replace were given away."""

    def held_memory(self) -> dict[str, int]:
        return {}

    def __call__(
        self, global_batch: ArrayGlobalBatch, learning_rate: float, program: jax.stages.Compiled | None = None
    ) -> PendingStep:
        """program: of `compile_with_dump`, to be run instead of the step's own."""
        self.called_at = time.perf_counter()
        self._taken += 1
        with jax.profiler.StepTraceAnnotation("step", step_num=self._taken):
            self.state, metrics = self._run("step", program, *self._step_arguments(global_batch, learning_rate))
        return PendingStep(metrics)

    def compile_with_dump(
        self, global_batch: ArrayGlobalBatch, folder: Path, options: Mapping[str, Any]
    ) -> jax.stages.Compiled:
        """The step's program for such a global batch, which XLA describes in `folder`. options: besides the
        recipe's."""
        with _without_compilation_cache():
            given = self._step_arguments(global_batch, 0.0)
            return self._compile("step", given, {**options, "xla_dump_to": str(folder)})

    def evaluate(self, global_batches: Iterable[GlobalBatch | ArrayGlobalBatch]) -> Evaluation:
        loss, count, correct, build = 0.0, 0, 0, self.build
        for whole in global_batches:
            if not isinstance(whole, ArrayGlobalBatch):
                whole = stack_for(build, whole)
            found = self._run("evaluation", None, self.state["params"], self._device_put(whole))
            loss, count, correct = loss + float(found[0]), count + whole.count, correct + int(found[1])
        return Evaluation(loss=Total(loss, count), correct=correct)

    def global_batches(
        self, source: GlobalBatchSource, start: int, stop: int, workers: int | None = None
    ) -> Generator[ArrayGlobalBatch]:
        return global_batches(self.build, source, start, stop, workers)

    def generate(self, prompt: Sequence[int], new_tokens: int, temperature: float, seed: int) -> list[int]:
        """Without a cache, by one program for every length: each token is sampled from the last `seq_len`.

        temperature: divides the logits; 0 takes the likeliest. seed: of this sample alone.
        """
        random, tokens, context = np.random.default_rng(seed), list(prompt), self.build.recipe.seq_len
        for _ in range(new_tokens):
            seen = tokens[-context:]
            ids = np.zeros((1, context), np.int32)  # the last real token does not see what follows it
            ids[0, : len(seen)] = seen
            given = jax.device_put({"ids": ids, "place": np.int32(len(seen) - 1)}, self.build.replicated)
            scores = np.asarray(self._run("sample", None, self.state["params"], given), np.float64)
            if temperature:
                likely = np.exp((scores - scores.max()) / temperature)
                tokens.append(int(random.choice(len(likely), p=likely / likely.sum())))
            else:
                tokens.append(int(scores.argmax()))
        return tokens[len(prompt) :]

    def save(self, folder: Path) -> dict[str, Any]:
        return save_state(self.build.network, self.state, folder)

    def load(self, folder: Path, meta: dict[str, Any]) -> None:
        with memory_guard("restoring a checkpoint"):
            self.state = load_state(self.build.network, abstract_state(self.build), folder)
        self._taken = int(self.state["step"])

    def export(self, folder: Path, classes: dict[int, str] | None) -> None:
        write_model(self.build.network, jax.device_get(self.state["params"]), folder)

    def close(self) -> None:
        """The model was never changed."""

    def is_finite(self) -> bool:
        finite = jax.jit(lambda params: jnp.stack([jnp.isfinite(array).all() for array in params.values()]).all())
        return bool(finite(self.state["params"]))

    def peak_memory(self) -> int:
        if self.build.device.kind == "cuda":
            return max(int(device.memory_stats()["peak_bytes_in_use"]) for device in self.build.devices)
        return peak_process_memory()

    def planned_memory(self) -> int:
        """Bytes that XLA plans for the largest program that was compiled so far: arguments, results that take no
        argument's place, and all else."""
        plans = [compiled.memory_analysis() for compiled in self._compiled.values()]
        return max((plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
                    - plan.alias_size_in_bytes for plan in plans if plan is not None), default=0)  # fmt: skip

    def context_memory(self) -> int | None:
        """None: JAX's driver interface does not say."""
        return None

    def _initial(self) -> State:
        """The state before the first step, drawn on the device or read from the model's folder."""
        build, seed = self.build, self.build.recipe.seed
        given: list[Any] = [jax.device_put(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), build.replicated)]
        with memory_guard("building the model"):
            if build.stored is not None:
                weights = read_weights(build.network, build.stored)
                given.append({name: jax.device_put(weights.pop(name), build.replicated) for name in list(weights)})
            begin = jax.jit(partial(initial_state, build), out_shardings=build.replicated, donate_argnums=1,
                            compiler_options=build.compiler_options)
            state: State = begin(*given)
            return state

    def _step_arguments(self, global_batch: ArrayGlobalBatch, learning_rate: float) -> tuple[Any, ...]:
        """A step's arguments, on the devices."""
        numbers = (np.int32(global_batch.count), np.float32(learning_rate))
        return self.state, self._device_put(global_batch), *jax.device_put(numbers, self.build.replicated)

    def _device_put(self, global_batch: ArrayGlobalBatch) -> Arrays:
        """The global batch's arrays on the devices. Raises ModelError for ids that the model has no row for: a compiled
        program would read another one."""
        ids, labels = global_batch.arrays["input_ids"], global_batch.arrays["labels"]
        vocabulary, outputs = self.build.facts.vocab_size, self.build.network.outputs
        if int(labels.max()) >= outputs:
            raise ModelError(f"model: it gives {outputs} logits, and the data has the label {int(labels.max())}; write "
                             "vocab_size to match the data")
        if int(ids.max()) >= vocabulary or int(ids.min()) < 0 or int(labels.min()) < min(IGNORE, 0):
            raise ModelError(f"model: its vocabulary has {vocabulary} tokens, and the data has the token "
                             f"{int(ids.max())}; write vocab_size to match the data")
        return {name: jax.device_put(array, self.build.batch_sharding) for name, array in global_batch.arrays.items()}

    def _run(self, kind: str, program: jax.stages.Compiled | None, state: Any, arrays: Arrays, *numbers: Any) -> Any:
        """The result of a program, by default that of its kind for arrays of these shapes, compiled now where it is the
        first time."""
        key = (kind, *((name, array.shape) for name, array in sorted(arrays.items())))
        if program is None and key not in self._compiled:
            self._compiled[key] = self._compile(kind, (state, arrays, *numbers), {})
        run = program or self._compiled[key]
        with memory_guard(f"the {kind}"):
            return run(state, arrays, *numbers)

    def _compile(self, kind: str, given: tuple[Any, ...], options: Mapping[str, Any]) -> jax.stages.Compiled:
        lowered, began = self._functions[kind].lower(*given), time.perf_counter()
        with memory_guard(f"compiling the {kind}"):
            compiled = lowered.compile(compiler_options={**self.build.compiler_options, **options})
        self.compile_seconds += time.perf_counter() - began
        return compiled


@contextmanager
def _without_compilation_cache() -> Iterator[None]:
    """A compilation without JAX's cache on disk: XLA describes only what it compiles."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # else what was decided at the first compilation stands
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@contextmanager
def memory_guard(doing: str) -> Iterator[None]:
    """An OutOfMemory that says what was being done, in place of JAX's error of a device without room."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).strip().splitlines()[0]
        raise OutOfMemory(f"the device ran out of memory while doing this: {doing} ({first})") from None

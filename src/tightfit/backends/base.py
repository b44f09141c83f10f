"""The interface between framework-free code and a backend: build a step, run it, save it."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from tightfit.backends.world import World
from tightfit.devices import Device
from tightfit.metrics import Evaluation, Total
from tightfit.recipe import Recipe
from tightfit.tasks import GlobalBatch
from tightfit.techniques import SLOTS, Technique
from tightfit.trace import Trace, UntracedMemory

if TYPE_CHECKING:
    from tightfit.backends.measurements import Measurement, ModelSize, Timings

T = TypeVar("T")

WARM_UP = 2
"""Steps before any is measured: the first makes the optimizer's states, compiles, and picks kernels."""
TIMED_STEPS = 5
"""Plain steps that are timed before the one whose every op is followed; the one of median length counts."""


class DrawnAtRandom(str):
    """A note on weights that were to be read and are not stored. names: theirs, where others are."""

    names: Sequence[str] = ()


class ParameterCounts(NamedTuple):
    """Numbers of a model's parameters. active: those that a token meets. trained: those that are not frozen."""

    every: int
    active: int
    trained: int


@dataclass(frozen=True)
class Metric(Total):
    """A figure of a step beside its loss. adds_up: whether it is what the global batch in one piece would give, however
    that is split."""

    adds_up: bool = True


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The metrics of one step.

    metrics: what else it measured, by name, such as the balance loss of a mixture of experts.
    grad_norm: the norm before clipping, None where nothing is clipped.
    skipped: whether loss scaling left the weights alone because the gradients overflowed.
    """

    loss: Total
    grad_norm: float | None = None
    skipped: bool = False
    metrics: Mapping[str, Metric] = field(default_factory=dict)


class PendingResult(Protocol):
    """A step's result that may still be under way on the device."""

    def ready(self) -> bool:
        """Whether `read` would return at once."""

    def read(self) -> StepResult:
        """Wait for the step and return its result."""


class GlobalBatchSource(Protocol):
    """Source of global batches: each is a pure function of its index. It must survive pickling to a worker
    process."""

    def __len__(self) -> int:
        """Global batches in an epoch."""

    def global_batch(self, index: int) -> GlobalBatch:
        """The global batch of that index, counted from the run's beginning."""

    def shard(self, rank: int, of: int) -> GlobalBatchSource:
        """The same global batches, of each the part of one of `of` processes."""


class Step(Protocol):
    """One optimizer step over a global batch: the function that training runs, planning traces and profiling
    measures."""

    @property
    def attention_kernels(self) -> tuple[str, ...]:
        """The attention kernels that ran in the first forward pass, by name; none where that is not known."""

    @property
    def experts_functions(self) -> tuple[str, ...]:
        """The functions that computed a mixture of experts in the first forward pass, by name; none elsewhere."""

    @property
    def parameters(self) -> ParameterCounts:
        """Numbers of the model's parameters, shared ones once."""

    @property
    def compile_seconds(self) -> float:
        """Seconds spent compiling so far."""

    @property
    def intact(self) -> bool:
        """Whether weights and optimizer states are those after the last whole step, as an error left them."""

    def held_memory(self) -> dict[str, int]:
        """Bytes of the device's memory by what holds them, the most first; empty where that is not known."""

    def global_batches(
        self, source: GlobalBatchSource, start: int, stop: int, workers: int | None = None
    ) -> Generator[Any]:
        """The global batches from `start` up to, not including, `stop`, prepared ahead as the recipe's loading says.
        workers: in place of the recipe's."""

    def __call__(self, global_batch: Any, learning_rate: float) -> PendingResult:
        """Learn from one of `global_batches`' global batches."""

    def evaluate(self, global_batches: Iterable[GlobalBatch]) -> Evaluation:
        """The sums over `global_batches`, of all processes, with nothing learned."""

    def generate(self, prompt: Sequence[int], new_tokens: int, temperature: float, seed: int) -> list[int]:
        """Token ids that a causal-lm continues `prompt` with."""

    def save(self, folder: Path) -> dict[str, Any]:
        """Write weights, optimizer and random state as safetensors into `folder`; return the rest as JSON values. Every
        process of a world calls this and `export`, and the first writes."""

    def load(self, folder: Path, meta: dict[str, Any]) -> None:
        """Restore what `save` wrote, exactly. Raises CheckpointError where it does not fit this recipe's model."""

    def export(self, folder: Path, classes: dict[int, str] | None) -> None:
        """Write the model alone, in the form that others read (`save_pretrained`, or safetensors).

        classes: the names of the classes that it predicts, where the data named them.
        """

    def close(self) -> None:
        """Give the model back as an ordinary one: no step follows."""

    def is_finite(self) -> bool:
        """Whether every weight is a finite number."""

    def peak_memory(self) -> int:
        """Peak bytes: allocated on a CUDA device since the step was made; on the CPU resident in the process, since it
        began."""

    def context_memory(self) -> int | None:
        """Bytes that this process has on the CUDA device outside the allocator: context, kernels, libraries. None on
        the CPU, and where the driver does not say."""


class StepProfiler(Protocol):
    """Measures steps that another loop takes: some as they are, then one with every op and every allocation followed.

    None learns anything else for being measured.
    """

    def timed(self) -> AbstractContextManager[None]:
        """Time the one step that is taken inside, the wait for its global batch included."""

    def profiled(self, global_batch: Any, learning_rate: float) -> PendingResult:
        """Take a step, followed. Where following it fails, the step is taken all the same, and `measurement` says why.
        """

    def measurement(self, chrome_trace: Path | None = None) -> Measurement:
        """The measurement of the steps. chrome_trace: where the framework's own profile goes, gzipped, for Perfetto.

        Raises ReportError where the step could not be followed, and OSError where that file cannot be written.
        """


class Backend(Protocol):
    """A framework."""

    def device(self, recipe: Recipe) -> Device:
        """The device that the recipe runs on. Raises Refused where there is none."""

    def world(self, recipe: Recipe) -> AbstractContextManager[World]:
        """The processes that train the recipe together, joined while this is entered. Raises Refused where they are to
        be started first, and LostProcess where they do not find each other."""

    def limit_memory(self, recipe: Recipe, memory_bytes: int) -> Device:
        """Make this process's GPU one of `memory_bytes`, its context counted, and return it so. Raises Refused where
        there is no GPU, or one of less memory."""

    def absences(self, recipe: Recipe) -> list[str]:
        """Reasons why this backend cannot serve a recipe, resolved or not, on any device."""

    def build(self, recipe: Recipe, device: Device, model: Any = None, config: Any = None) -> Any:
        """The model with every technique of a resolved recipe applied.

        model: a module of the caller's own, instead of what `recipe.model` names. config: that model's configuration as
        `models.read_config` gives it; None reads it.
        Raises Refused with all reasons where a technique cannot serve.
        """

    def step(self, build: Any) -> Step:
        """The training step of a build."""

    def predict(self, recipe: Recipe, device: Device, model: Any = None) -> Trace:
        """The trace of a resolved recipe's step on a device that need not be present: see `trace.Trace`.

        No weights are read, and no parameter is allocated. Raises as `build` does, and ModelError where a model cannot
        be traced.
        """

    def model_size(self, recipe: Recipe, config: Any = None) -> ModelSize:
        """The size of the model that a recipe names, for its task, with no technique applied but what is trained.
        config: as of `build`.

        No weight is allocated. Raises ModelError for a model that cannot be built.
        """

    def step_profiler(self, step: Any) -> StepProfiler:
        """The profiler of `step`, for steps that a run takes; `measuring.measure` takes some by itself."""

    def time(self, step: Any, global_batches: Iterator[Any], warm_up: int, steps: int) -> Timings:
        """Take `warm_up` + `steps` + 1 steps of `step` on its own `global_batches`, and say what each of `steps`
        took."""

    def untraced(self, recipe: Recipe, device: Device, trace: Trace) -> list[UntracedMemory]:
        """Memory of the recipe's step on a device that its trace, of this device or of one like it, does not hold."""


def unchanged(technique: Technique, build: T) -> T:
    """The build as it is, for what every step does without a technique, or reads from the recipe."""
    return build


def absences(recipe: Recipe, absent: Mapping[type[Technique], str]) -> list[str]:
    """Reasons why techniques that the recipe names are not in a backend, each naming its field. absent: the backend's
    table of what it does not have."""
    named = {slot: getattr(recipe, slot) for slot in SLOTS}
    return [
        f"{slot}: {technique.name} is not in backend: {recipe.backend.name}, because {absent[type(technique)]}"
        for slot, technique in named.items()
        if type(technique) in absent
    ]

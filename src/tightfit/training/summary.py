"""A run's beginning in two lines, and its summary: its figures, as `summary.json` holds them and as a person reads
them, and a sample of what the model writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter

from tightfit.bundled import BUNDLED
from tightfit.data.samples import Packed
from tightfit.errors import DataError, OutOfMemory
from tightfit.metrics import metrics_text
from tightfit.recipe import CHOICES, Recipe
from tightfit.recipe.yaml import field_text
from tightfit.tasks import get_task
from tightfit.techniques import VARIANTS
from tightfit.text import counted, percent, size
from tightfit.training.run_folder import SUMMARY, finite
from tightfit.training.state import SAVE_SECONDS

if TYPE_CHECKING:
    from tightfit.backends.base import Step
    from tightfit.backends.world import World
    from tightfit.data import Prepared
    from tightfit.training.session import Session
    from tightfit.training.state import TrainerState

SAMPLE_TOKENS = 160
"""Length of the sample of the trained model's text, in tokens."""
SAMPLE_TEMPERATURE = 0.7
"""Temperature at which its tokens are drawn."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run's figures. Seconds are this process's; loss is in nats a label; memory in bytes. Those named eval_ are as
    of `tightfit.metrics`.

    training_seconds: time in steps and waiting for data; evaluation, saving, compiling and a profiled step are apart.
    tokens_seen: real input tokens (images: images) since the run's beginning.
    data_wait_seconds: the part of it spent waiting for data.
    peak_memory: allocated on a CUDA device, resident in the process on the CPU.
    context_memory: on a CUDA device, what the process has there outside the allocator; None where that is not known.
    first_step: the step that this process went on from; 0 for a run in one piece.
    skipped_steps: steps in which loss scaling left the weights alone. profiled_steps: those that were profiled.
    metrics: the last step's, by name; of a mixture of experts its routers' losses, and the fullest expert's load over
        the mean. inexact: those of them that hang on how the global batch was split.
    experts_functions: the functions that computed experts.
    stopped_by: the signal that ended the run early; None where it ran to its last step.
    eval_step: the step that the metrics named eval_ are of.
    early_stopped: whether it ended because evaluations were no longer better. best_step: the step of the best one
        whose checkpoint is there, where they were compared.
    """

    steps: int
    seconds: float
    training_seconds: float
    compile_seconds: float
    data_wait_seconds: float
    samples_per_second: float
    tokens_per_second: float
    peak_memory: int
    device: str
    tokens_seen: int = 0
    context_memory: int | None = None
    first_step: int = 0
    skipped_steps: int = 0
    profiled_steps: int = 0
    parameters: int = 0
    active_parameters: int = 0
    trained_parameters: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    eval_accuracy: float | None = None
    eval_f1: float | None = None
    eval_step: int | None = None
    unigram_loss: float | None = None
    attention_kernels: tuple[str, ...] = ()
    experts_functions: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    inexact: tuple[str, ...] = ()
    sample: str | None = None
    stopped_by: str | None = None
    early_stopped: bool = False
    best_step: int | None = None
    output_dir: str = ""
    losses: tuple[float, ...] = field(default=(), repr=False)

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    def to_dict(self) -> dict[str, Any]:
        values = finite(asdict(self))
        values["metrics"] = {name: value for name, value in finite(self.metrics).items() if value is not None}
        values.pop("losses")
        return values

    @classmethod
    def read(cls, path: Path) -> Self:
        """The summary in a file. Raises OSError, and ValueError for one that is damaged or of another version."""
        return TypeAdapter(cls).validate_json(path.read_bytes(), strict=True)

    @classmethod
    def of(cls, run: Path) -> Self | None:
        """The summary of a run that finished in a folder; None where there is none that `read` can read."""
        try:
            return cls.read(run / SUMMARY)
        except (OSError, ValueError):
            return None

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each figure, as a person reads them."""
        share = self.data_wait_seconds / self.training_seconds if self.training_seconds else 0.0
        # A sample without tokens, such as a picture, counts as one.
        tokens = f", {self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second > self.samples_per_second else ""
        memory = "peak allocated" if self.device != "CPU" else "peak resident"
        resumed = self.first_step > 0
        timed = self.steps - self.first_step - self.profiled_steps
        which = ["since resuming"] * resumed + ["without the profiled one"] * self.profiled_steps
        steps = counted(self.steps, "step")
        steps = f"{timed:,} of {steps}, {', '.join(which)}," if which else steps
        rows = [
            ("steps", f"{self.training_seconds:.1f} s for {steps} on {self.device}"),
            ("throughput", f"{self.samples_per_second:,.1f} samples/s{tokens} in those steps"),
            ("whole run", f"{self.seconds:.1f} s{' since resuming' * resumed}: loading, steps, evaluation and saving"),
            (memory, size(self.peak_memory) + ", of the whole process" * (self.device == "CPU")),
        ]
        if self.context_memory is not None:
            rows.append(("CUDA context", f"{size(self.context_memory)}, outside PyTorch's allocator"))
        rows.append(("waiting for data", f"{self.data_wait_seconds:.2f} s ({share:.1%} of training)"))
        if self.skipped_steps:
            rows.append(("skipped by loss scaling", counted(self.skipped_steps, "step")))
        if self.compile_seconds:
            rows.append(("compiling", f"{self.compile_seconds:.1f} s, not counted in throughput"))
        if self.attention_kernels:
            rows.append(("attention kernel", ", ".join(self.attention_kernels)))
        if self.metrics:
            rows.append(("experts", self._experts()))
        if self.loss is not None:
            rows.append(("last step's loss", f"{self.loss:.4f}"))
        if self.eval_loss is not None:
            found = metrics_text(asdict(self))
            if self.unigram_loss is not None:
                found += f"; unigram baseline {self.unigram_loss:.4f}"
            earlier = self.eval_step not in (None, self.steps)
            rows.append((f"held-out at step {self.eval_step}" if earlier else "held-out", found))
        if self.best_step is not None:
            rows.append(("best evaluation", f"at step {self.best_step}, whose checkpoint is kept"))
        return rows

    def _experts(self) -> str:
        """Kernels of the experts, and how evenly tokens fell on them, in the last step."""
        own = " (each micro-batch's own)" if "balance_loss" in self.inexact else ""
        return "; ".join([
            *([", ".join(self.experts_functions)] if self.experts_functions else []),
            f"balance loss {self.metrics['balance_loss']:.3f}{own}, 1 where all are used alike",
            f"the fullest has {self.metrics['expert_load']:.2f} times the mean's tokens, and none is dropped",
        ])


def summarize(
    session: Session, step: Step, data: Prepared, state: TrainerState, path: Path, began: float, world: World
) -> Summary:
    """The run's figures. path: of its folder. began: when, by time.perf_counter."""
    seconds, counts = state.training_seconds or 1e-9, step.parameters
    return Summary(
        steps=state.step,
        first_step=state.first_step,
        skipped_steps=state.skipped_steps,
        profiled_steps=state.profiled_steps,
        parameters=counts.every,
        active_parameters=counts.active,
        trained_parameters=counts.trained,
        output_dir=str(path),
        seconds=time.perf_counter() - began,
        training_seconds=state.training_seconds,
        compile_seconds=step.compile_seconds,
        data_wait_seconds=state.data_wait_seconds,
        samples_per_second=state.samples / seconds,
        tokens_per_second=state.tokens / seconds,
        tokens_seen=state.tokens_seen,
        peak_memory=int(world.all_reduce_max(step.peak_memory())),
        context_memory=step.context_memory(),
        device=session.device.name,
        loss=state.losses[-1] if state.losses else None,
        unigram_loss=data.unigram_loss,
        attention_kernels=step.attention_kernels,
        experts_functions=step.experts_functions,
        metrics={name: metric.mean for name, metric in state.metrics.items()},
        inexact=tuple(name for name, metric in state.metrics.items() if not metric.adds_up),
        stopped_by=state.stopped_by,
        early_stopped=state.early_stopped,
        best_step=state.best_step,
        losses=tuple(state.losses),
        eval_step=state.eval_step,
        **state.evaluation,
    )


def beginning(recipe: Recipe, step: Step, data: Prepared, global_batches: int) -> tuple[str, str]:
    """One line on what is about to be trained, and one on how."""
    weights, counts = "", step.parameters
    if recipe.model in BUNDLED:
        weights = " from random weights (a bundled shape; a Hugging Face id or folder brings its own)"
    parts = [f"{counts.active:,} are active per token"] if counts.active != counts.every else []
    if counts.trained != counts.every:
        parts.append(f"{counts.trained:,} are trained ({percent(counts.trained / counts.every)})")
    of_which = f", of which {' and '.join(parts)}{weights and ','}" if parts else ""
    held_out, own = "" if data.evaluation is None else f" and {len(data.evaluation):,} held out", ""
    if recipe.data.eval_source is not None:
        held_out, own = "", f", {len(data.evaluation or ()):,} to evaluate on of {recipe.data.eval_source}"
    what = (f"{recipe.model}: {counts.every:,} parameters{of_which}{weights}; {len(data.train):,} training samples"
            f"{held_out} of {recipe.data.source}{own}, {global_batches:,} steps an epoch; "
            f"{counted(recipe.max_steps, 'step')} at learning_rate {recipe.learning_rate:g}")
    rows = "packed" if isinstance(data.train, Packed) else "padded"
    length = "" if get_task(recipe.task).reads == "images" else f"seq_len={recipe.seq_len} ({rows} rows) "
    fields = ("batch_size", "micro_batch_size", *(
        slot for slot, variants in VARIANTS.items() if slot in CHOICES or getattr(recipe, slot).name != variants[0].name
    ))  # fmt: skip
    return what, (f"with {length}{' '.join(field_text(field, getattr(recipe, field)) for field in fields)}; "
                  f"{_saving(recipe)}")


def _saving(recipe: Recipe) -> str:
    """The times at which a run is saved, in words."""
    every = recipe.save_steps
    if every is None:
        return "saved at the end or when stopped"
    if isinstance(every, str):
        return "saved after each epoch" if every == "epoch" else f"saved every {SAVE_SECONDS / 60:.0f} minutes"
    return f"saved every {counted(recipe.in_steps(every), 'step')}"


def sample_text(recipe: Recipe, step: Step, data: Prepared, log: Callable[[str], None]) -> str | None:
    """The recipe's prompt, continued by the trained model; None where there is none to continue."""
    if recipe.sample_prompt is None or get_task(recipe.task).predicts != "next" or data.tokenizer is None:
        return None
    answers = data.turn_end is not None  # it learned from conversations, and answers in one
    encode = data.tokenizer.encode_prompt
    if answers:
        from tightfit.data.chat import question  # for these alone

        encode = partial(question, data.tokenizer)
    try:
        prompt = encode(recipe.sample_prompt)
    except (TypeError, UnicodeError, DataError):  # such as a lone surrogate
        prompt = []
    if not prompt:
        log("no sample: sample_prompt holds no token to begin with")
        return None
    try:
        tokens = step.generate(prompt, SAMPLE_TOKENS, temperature=SAMPLE_TEMPERATURE, seed=recipe.seed)
    except OutOfMemory as error:
        log(f"no sample: {error}")
        return None
    ends = (data.tokenizer.end_id, data.turn_end)
    tokens = list(takewhile(lambda token: token not in ends, tokens))
    return recipe.sample_prompt + "\n" * answers + data.tokenizer.decode(tokens)

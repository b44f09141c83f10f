"""Records of a run: metrics.jsonl, the trackers that a recipe names, and the summary."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from tightfit.backends.base import Evaluation
from tightfit.errors import MissingLibrary, RecipeError, install_command, nearest, one_line
from tightfit.files import write_atomically
from tightfit.recipe import Recipe
from tightfit.training.run_folder import METRICS, RunFolder

EVALUATED = {
    "eval_loss": "loss {:.4f}", "eval_perplexity": "perplexity {:,.2f}", "eval_accuracy": "accuracy {:.1%}",
    "eval_f1": "macro F1 {:.3f}",
}
"""The metrics of an evaluation as they are written down, and as a person reads them."""


def evaluation_metrics(found: Evaluation) -> dict[str, Any]:
    """The metrics of an evaluation, by the names that the Hugging Face Trainer and its examples write.

    Perplexity is of tokens, the exponential of the loss; accuracy the share of labels, classes or tokens, that have the
    largest logit; F1 the mean of the classes'.
    """
    loss = found.loss.mean
    shared = {"eval_loss": loss, "eval_accuracy": found.correct / max(found.loss.count, 1)}
    if found.f1 is not None:
        return {**shared, "eval_f1": found.f1}
    return {**shared, "eval_perplexity": math.exp(min(loss, 700.0))}


def metrics_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation in a line that was written of it."""
    return {name: line[name] for name in EVALUATED if name in line}


def metrics_text(metrics: Mapping[str, float]) -> str:
    """An evaluation's metrics as a person reads them: `loss 1.2345, perplexity 3.4, accuracy 65.4 %`."""
    return ", ".join(text.format(metrics[name]) for name, text in EVALUATED.items() if metrics.get(name) is not None)


class MetricsLog:
    """metrics.jsonl in a run's folder, and the trackers that a recipe names: TensorBoard, Weights & Biases and others,
    through Accelerate.

    The file holds one JSON object a line: `step`, and what was measured there; null for what is not a finite number.
    Lines after `resume_step` are dropped first; `evaluations` are those up to it that are of one.
    """

    def __init__(self, recipe: Recipe, folder: Path, resume_step: int) -> None:
        path, kept = folder / METRICS, []
        self.evaluations: list[dict[str, Any]] = []
        if path.exists() and resume_step:
            for line in path.read_text("utf-8", "replace").splitlines():
                try:
                    values = json.loads(line)
                    if values["step"] <= resume_step:
                        kept.append(line)
                        self.evaluations += [values] if "eval_loss" in values else []
                except (ValueError, TypeError, KeyError, RecursionError):  # such as the last line of a run cut off
                    continue
        write_atomically(path, "".join(f"{line}\n" for line in kept))
        self._trackers = ExitStack()
        self._logs: list[Callable[..., None]] = []
        with self._trackers:
            self._start_trackers(recipe, folder)
            self._trackers = self._trackers.pop_all()  # none goes on where one cannot start
        self._file = path.open("a", 1, "utf-8")

    def _start_trackers(self, recipe: Recipe, folder: Path) -> None:
        if not recipe.report_to:
            return
        try:
            from accelerate import PartialState
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS
        except ImportError:
            wanted = "tensorboard" if "tensorboard" in recipe.report_to else "accelerate"
            raise MissingLibrary("accelerate", "report_to", install_command(wanted)) from None
        known = {str(getattr(name, "value", name)): tracker for name, tracker in LOGGER_TYPE_TO_CLASS.items()}
        if unknown := [name for name in recipe.report_to if name not in known]:
            raise RecipeError(f"report_to: {unknown[0]!r} is not known; {nearest(unknown[0], known)}")
        PartialState(cpu=recipe.device == "cpu")
        values = {name: value if isinstance(value, int | float | str) else str(value)
                  for name, value in recipe.to_dict().items()}
        for name in recipe.report_to:
            arguments = {"logging_dir": str(folder / "trackers")} if known[name].requires_logging_directory else {}
            try:
                tracker = known[name](folder.name, **arguments)
                tracker.start()
                tracker.store_init_configuration(values)
            except ImportError:
                raise MissingLibrary(name, f"report_to={name}") from None
            except Exception as error:  # each tracker has exceptions of its own
                raise RecipeError(f"report_to: {name} cannot start: {one_line(error)}") from None
            self._trackers.callback(tracker.finish)
            self._logs.append(tracker.log)

    def write(self, values: dict[str, Any]) -> None:
        """Write down what was measured at `values["step"]`."""
        finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        for log in self._logs:
            log({name: value for name, value in values.items() if name != "step"}, step=values["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()
        self._trackers.close()


class NullMetricsLog:
    """The log of a process that another one writes for."""

    evaluations: tuple[dict[str, Any], ...] = ()

    def write(self, values: dict[str, Any]) -> None:
        """It is written elsewhere."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is open."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run's figures. Seconds are this process's; loss is in nats a label; memory in bytes. Those named eval_ are as
    of `evaluation_metrics`.

    training_seconds: time in steps and waiting for data; evaluation, saving, compiling and a profiled step are apart.
    tokens_seen: real input tokens (images: images) since the run's beginning.
    data_wait_seconds: the part of it spent waiting for data.
    peak_memory: allocated on a CUDA device, resident in the process on the CPU.
    context_memory: on a CUDA device, what the process has there outside the allocator; None where that is not known.
    first_step: the step that this process went on from; 0 for a run in one piece.
    skipped_steps: steps in which loss scaling left the weights alone.
    metrics: the last step's, by name; of a mixture of experts its routers' losses, and the fullest expert's load over
        the mean. inexact: those of them that hang on how the global batch was split.
    experts_functions: the functions that computed experts.
    stopped_by: the signal that ended the run early; None where it ran to its last step.
    early_stopped: whether it ended because evaluations were no longer better. best_step: the step of the best one,
        where they were compared.
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
    parameters: int = 0
    active_parameters: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    eval_accuracy: float | None = None
    eval_f1: float | None = None
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

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values.pop("losses")
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The summary that `to_dict` gave. Raises TypeError for other fields."""
        known: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**known)

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each figure, as a person reads them."""
        share = self.data_wait_seconds / self.training_seconds if self.training_seconds else 0.0
        # A sample without tokens, such as a picture, counts as one.
        tokens = f", {self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second > self.samples_per_second else ""
        memory = "peak memory" if self.device != "CPU" else "peak memory of the process"
        rows = [
            ("steps", f"{self.training_seconds:.1f} s for {self.steps - self.first_step} steps on {self.device}"),
            ("throughput", f"{self.samples_per_second:,.1f} samples/s{tokens} in those steps"),
            ("whole run", f"{self.seconds:.1f} s, with start-up, evaluation and saving besides those steps"),
            (memory, f"{self.peak_memory / 2**20:,.0f} MiB"),
        ]
        if self.context_memory is not None:
            outside = f"{self.context_memory / 2**20:,.0f} MiB outside the allocator, besides the peak"
            rows.append(("CUDA context", outside))
        rows.append(("waiting for data", f"{self.data_wait_seconds:.2f} s ({share:.1%} of training)"))
        if self.skipped_steps:
            rows.append(("skipped by loss scaling", f"{self.skipped_steps} steps"))
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
                found += f"; the tokens' frequencies alone give a loss of {self.unigram_loss:.4f}"
            rows.append(("held-out", found))
        if self.best_step is not None:
            rows.append(("best evaluation", f"at step {self.best_step}, whose checkpoint is kept"))
        return rows

    def _experts(self) -> str:
        """How experts were computed, and how evenly tokens fell on them, in the last step."""
        own = " (each micro-batch's own)" if "balance_loss" in self.inexact else ""
        return "; ".join([
            *([", ".join(self.experts_functions)] if self.experts_functions else []),
            f"balance loss {self.metrics['balance_loss']:.3f}{own}, 1 where all are used alike",
            f"the fullest has {self.metrics['expert_load']:.2f} times the mean's tokens, and none is dropped",
        ])

def finished_rows(folder: Path) -> list[tuple[str, str]]:
    """The rows of the summary of the run that finished in a folder; none where there is none that can be read."""
    try:
        return Summary.from_dict(RunFolder(folder).summary() or {}).rows()
    except (TypeError, ValueError, AttributeError):  # none, or of another version
        return []

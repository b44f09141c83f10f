"""Metrics of an evaluation, each declared once: recipes, records, checkpoints and messages read the declaration.

A backend sums up an `Evaluation`; a metric is finished from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Total:
    """A sum and what it is to be divided by: the form in which metrics add up over micro-batches and processes."""

    sum: float
    count: int

    @property
    def mean(self) -> float:
        return self.sum / max(self.count, 1)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The sums of an evaluation, over the labels that count.

    correct: labels to which the model gives its largest logit. by_class: an integer array (3, classes), how often each
    class was predicted rightly, was the label, and was predicted; None where a sample has no class.
    """

    loss: Total
    correct: int
    by_class: Any = None


@dataclass(frozen=True, kw_only=True)
class EvalMetric:
    """A metric of an evaluation. text: its value as a person reads it. only_of: the predictions that it is measured
    on, where not on both."""

    finish: Callable[[Evaluation], float]
    text: str
    larger_is_better: bool = False
    only_of: str | None = None


def _macro_f1(found: Evaluation) -> float:
    right, labels, predicted = found.by_class
    seen = labels + predicted
    return float((2.0 * right / seen.clip(1)).sum() / (seen > 0).sum().clip(1))


MetricName = Literal["loss", "perplexity", "accuracy", "f1"]
METRICS: Mapping[str, EvalMetric] = {
    "loss": EvalMetric(finish=lambda found: found.loss.mean, text="loss {:.4f}"),
    "perplexity": EvalMetric(
        finish=lambda found: math.exp(min(found.loss.mean, 700.0)), text="perplexity {:,.2f}", only_of="tokens"),
    "accuracy": EvalMetric(
        finish=lambda found: found.correct / max(found.loss.count, 1), text="accuracy {:.1%}", larger_is_better=True),
    "f1": EvalMetric(finish=_macro_f1, text="macro F1 {:.3f}", larger_is_better=True, only_of="classes"),
}
"""By name; written down as `eval_<name>`, as the Hugging Face Trainer and its examples do. Loss in nats a label;
perplexity its exponential; accuracy the share of labels that have the largest logit; F1 the mean over the classes that
are a label or were predicted (macro F1)."""


def evaluation_metrics(found: Evaluation) -> dict[str, float]:
    """The metrics of an evaluation, by the names under which they are written down."""
    kind = "tokens" if found.by_class is None else "classes"
    return {f"eval_{name}": metric.finish(found) for name, metric in METRICS.items() if metric.only_of in (None, kind)}


def metrics_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation in a line that was written of it."""
    return {f"eval_{name}": line[f"eval_{name}"] for name in METRICS if f"eval_{name}" in line}


def metrics_text(metrics: Mapping[str, float]) -> str:
    """An evaluation's metrics as a person reads them: `loss 1.2345, perplexity 3.4, accuracy 65.4 %`."""
    return ", ".join(metric.text.format(metrics[f"eval_{name}"]) for name, metric in METRICS.items()
                     if metrics.get(f"eval_{name}") is not None)

"""`tightfit evaluate`: metrics of a trained model, in a line or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tightfit.metrics import metrics_text
from tightfit.text import counted
from tightfit.training.evaluating import evaluate
from tightfit.training.listeners import LastingConsole, Terminal


def run_evaluate(words: Sequence[str], as_json: bool) -> None:
    """Print the metrics of a run's or recipe's model. words: its name, and overrides. Raises TightfitError."""
    with Terminal(LastingConsole(stderr=True, soft_wrap=True)) as terminal:
        found = evaluate(words, terminal)
    console = LastingConsole(soft_wrap=True)
    if as_json:
        values = {**found.metrics, "samples": found.samples, "labels": found.labels, "model": found.model}
        console.print_json(json.dumps(values))
        return
    tokens = "" if found.labels == found.samples else f"{found.labels:,} tokens that count"
    of = ", ".join(filter(None, [counted(found.samples, "sample"), tokens, found.rows]))
    console.print(f"{found.model}: {metrics_text(found.metrics)} ({of})", markup=False, highlight=False)

"""The best of a run's evaluations, when there will be no better one, and its weights for the finished model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tightfit.backends.base import Step
from tightfit.backends.world import World
from tightfit.errors import CheckpointError
from tightfit.metrics import METRICS, metrics_text
from tightfit.recipe import Recipe
from tightfit.training import checkpoints
from tightfit.training.run_folder import RunFolder
from tightfit.training.state import TrainerState


@dataclass
class Best:
    """The best of the evaluations that were added, by the metric that `recipe` names.

    It follows from what `metrics.jsonl` holds of them, so that a run that goes on needs nothing else to know it.
    step: of the best; None where there was none. metrics: its own. waited: evaluations since one was better than all
    before it by more than the threshold.
    """

    recipe: Recipe
    step: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    waited: int = 0

    @property
    def is_out_of_patience(self) -> bool:
        """Whether so many evaluations have not been better as the recipe waits for."""
        patience = self.recipe.early_stopping_patience
        return patience is not None and self.waited >= patience

    def add(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Compare an evaluation with those before it; whether it is the best."""
        metric = self.recipe.best_metric
        assert metric is not None
        found, before = metrics.get(f"eval_{metric}"), self.metrics.get(f"eval_{metric}")
        gain = -math.inf
        if found is not None and math.isfinite(found):
            sign = 1.0 if METRICS[metric].larger_is_better else -1.0
            gain = math.inf if before is None else sign * (found - before)
        self.waited = 0 if gain > self.recipe.early_stopping_threshold else self.waited + 1
        if gain > 0.0:
            self.step, self.metrics = step, dict(metrics)
        return gain > 0.0


def load_best(
    step: Step, state: TrainerState, folder: RunFolder, world: World, log: Callable[[str], None]
) -> None:
    """Put the best checkpoint's weights into the model, and its metrics in the place of the last ones."""
    if state.best_step in (None, state.step):
        return
    assert state.best_step is not None
    place = checkpoints.folder_of(folder.checkpoints, state.best_step)
    try:
        found = world.broadcast_from_rank0(lambda: checkpoints.read(place))
    except CheckpointError as error:
        log(f"load_best_model_at_end: the best checkpoint cannot be read ({error}); the model is the last step's")
        return
    step.load(found.folder, found.meta)
    state.evaluation = state.best_metrics
    log(f"the finished model is that of step {state.best_step}: held-out {metrics_text(state.evaluation)}")

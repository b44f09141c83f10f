"""The best of a run's evaluations, when there will be no better one, and its weights for the finished model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tightfit.backends.base import Step
from tightfit.backends.world import World
from tightfit.errors import CheckpointError
from tightfit.metrics import METRICS, metrics_of, metrics_text
from tightfit.recipe import Recipe
from tightfit.training import checkpoints
from tightfit.training.run_folder import RunFolder
from tightfit.training.state import TrainerState


@dataclass
class Best:
    """The best of the evaluations that were added, by the metric that `recipe` names.

    It follows from what `metrics.jsonl` holds of them, so that a run that goes on needs nothing else to know it.
    step: of the best whose checkpoint is there; None where there was none. metrics: its own. top, top_step: how good
    the best of all was, more being better, and its step. waited: evaluations since one was better than all before it by
    more than the threshold.
    """

    recipe: Recipe
    step: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    top: float = -math.inf
    top_step: int | None = None
    waited: int = 0

    @classmethod
    def of_run(
        cls, recipe: Recipe, evaluations: Iterable[Mapping[str, Any]], kept: Collection[int],
        log: Callable[[str], None],
    ) -> Best:  # fmt: skip
        """The best of the evaluations that a run made before it went on here. kept: steps that have checkpoints."""
        best = cls(recipe)
        for line in evaluations:
            best.add(line["step"], metrics_of(line), line["step"] in kept)
        if best.step != best.top_step:  # such as by save_total_limit, before the recipe named a metric
            log(f"the checkpoint of step {best.top_step}, whose evaluation was the best so far, is gone: the best is "
                "chosen among " + ("those to come" if best.step is None else f"step {best.step} and those to come"))
        return best

    @property
    def is_out_of_patience(self) -> bool:
        """Whether so many evaluations have not been better as the recipe waits for."""
        patience = self.recipe.early_stopping_patience
        return patience is not None and self.waited >= patience

    def add(self, step: int, metrics: Mapping[str, Any], kept: bool = True) -> bool:
        """Compare an evaluation with those before it; whether it is the best. kept: whether its checkpoint is there,
        or will be."""
        found, before = self._goodness(metrics), self._goodness(self.metrics)
        self.waited = 0 if found - self.top > self.recipe.early_stopping_threshold else self.waited + 1
        if found > self.top:
            self.top, self.top_step = found, step
        if not kept or found <= before:
            return False
        self.step, self.metrics = step, dict(metrics)
        return True

    def _goodness(self, metrics: Mapping[str, Any]) -> float:
        """The metric of an evaluation, more being better; minus infinity for none."""
        metric = self.recipe.best_metric
        assert metric is not None
        found = metrics.get(f"eval_{metric}")
        if found is None or not math.isfinite(found):
            return -math.inf
        return float(found if METRICS[metric].larger_is_better else -found)


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
        state.best_step = None
        return
    step.load(found.folder, found.meta)
    state.evaluation, state.eval_step = state.best_metrics, state.best_step
    log(f"the finished model is that of step {state.best_step}: held-out {metrics_text(state.evaluation)}")

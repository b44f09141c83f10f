"""Data workers as many as a run needs, where its recipe leaves their number open."""

from __future__ import annotations

from dataclasses import dataclass, field

from tightfit.backends.world import World
from tightfit.recipe import Recipe
from tightfit.system import cores
from tightfit.techniques.loading import enough_workers

SEEN_STEPS = 8
"""Steps, and as many for each worker, whose waiting is looked at: workers that began together end together."""
LEAST_SHARE = 0.05
LEAST_SECONDS = 0.005
"""Waiting of a step, as a share of it and in seconds, below which its number of workers stays: handing a global batch
from one process to another costs milliseconds too."""


@dataclass
class DataWorkers:
    """The number of data workers, raised while steps wait for their global batches.

    number: now. prefetch: global batches that each prepares ahead. most: workers at most.
    """

    number: int
    prefetch: int
    most: int
    _seen: list[tuple[float, float]] = field(default_factory=list)

    def add(self, waited: float, seconds: float) -> None:
        """Count a step that took so many seconds, waiting for data for some of them."""
        if self.number < self.most:
            self._seen.append((waited, seconds))

    def raised(self) -> float:
        """The share of steps' time that went into waiting, where `number` was raised for it just now; else 0."""
        ahead = 1 + self.number * self.prefetch  # made while the first step took long
        looked_at = self._seen[ahead:]
        if len(looked_at) < SEEN_STEPS * max(self.number, 1):
            return 0.0
        waited, seconds = sum(step[0] for step in looked_at), sum(step[1] for step in looked_at)
        self._seen.clear()
        if waited < max(LEAST_SHARE * seconds, LEAST_SECONDS * len(looked_at)):
            self.most = self.number  # they suffice
            return 0.0
        self.number = min(max(enough_workers(waited, seconds, self.number), self.number + 1), self.most)
        return waited / seconds


def data_workers(asked: Recipe, resolved: Recipe, world: World) -> DataWorkers | None:
    """The number of data workers that a run begins with, where the recipe as written leaves it open; else None. A core
    is left to each training process."""
    begun = resolved.loading.workers
    if asked.loading.workers != "auto" or begun == "auto":
        return None
    return DataWorkers(begun, resolved.loading.prefetch, most=max(cores() // world.size - 1, 1))

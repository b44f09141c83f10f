"""Choosing: best first among the combinations of a space, until none left can win by more than the clock's own error.

The mildest level of numerics is looked at first, a harsher one where the recipe allows it or nothing milder fits. What
is evaluated next is what can be fastest, by what was evaluated before and what techniques declare (see `forecast`); so
much is traced as it is, at a real micro-batch, and nothing that is shown is interpolated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from tightfit.errors import Refused
from tightfit.planning.defaults import default_micro_batch
from tightfit.planning.search.findings import CLOCK_ERROR, Findings, Pair, Spent
from tightfit.planning.search.forecast import Unknown
from tightfit.planning.search.space import LAST_RESORT, Choice, Level

ROOTS = 4
"""Combinations that are tried until one can be built."""
NO_GAIN = 0.03
"""Share of a step's time for which no larger micro-batch is tried."""
LONGER = 50_000
"""Ops and allocations by which a trace may outgrow the first ones, as those of packed documents on a processor do."""


class Promise(NamedTuple):
    """speed: the most samples a second that a combination can reach. micro: where to evaluate it. fits: whether it is
    expected to fit there. unknown: values of which only rules of thumb are known."""

    choice: Choice
    micro: int
    speed: float
    fits: bool
    unknown: tuple[Unknown, ...]


class Exploration(Findings):
    """A search under way. See `Findings` for what it is made with."""

    def run(self) -> None:
        """Evaluate until the choice stands. Raises Refused or ModelError where nothing can be built."""
        self._start()
        levels = sorted({self.space.level(choice) for choice in self.space.choices})
        try:
            for spare in (True, False):
                self._by_level(levels, spare)
                if self.best(1) is not None:
                    break
            self._plainer()
            if self.space.recipe.mode == "inference":  # which has few, and all are shown
                self.evaluate([(choice, micro) for choice in self.weighed for micro in self.sizes])
        except Spent:
            if left := len(self._promising(self.weighed, self.best(1) is not None)):
                self.notes.append(f"combinations that might be better and were not traced: {left:,}; the limit of "
                                  f"{self.limit} traces was reached")
        self.kept_back = 0
        if self.best() is None:
            with contextlib.suppress(Spent):
                self._thriftiest(levels)

    def _by_level(self, levels: Sequence[Level], spare: bool) -> None:
        """Find the mildest level that fits, and then the best of it and of the harsher ones that it lets in."""
        for number, level in enumerate(levels):
            self._explore([level], spare, first=True)
            if self.best(1 if spare else 2) is None:
                continue
            let_in = not self.mildest and (level > (0, 0) or self.space.recipe.allow_numerics)
            harsher = [other for other in levels[number + 1 :] if other[0] < LAST_RESORT] if let_in else []
            self._explore([level, *harsher], spare)
            return

    def _start(self) -> None:
        """Evaluate the usual combination at two micro-batches; where it cannot be built, another kernel or format."""
        space = self.space
        at = default_micro_batch(space.recipe, space.device)
        high = max((size for size in self.sizes if size <= at), default=self.sizes[0])
        low = max((size for size in self.sizes if size <= high // 4), default=high)
        probes = [high] if self.limit < 20 else list(dict.fromkeys((low, high)))
        first = space.first
        roots = [choice for choice in space.choices
                 if len(space.differing(choice, first)) <= 1 and space.level(choice) == (0, 0)]
        roots.sort(key=lambda root: (root != first, root != space.plain,
                                     [space.fields.index(field) for field in space.differing(root, first)]))
        for root in (roots or space.choices)[:ROOTS]:
            self.evaluate([(root, micro) for micro in probes])
            if any(choice == root for choice, _ in self.found):
                self._broken |= {(field, first[space.fields.index(field)])
                                 for field in space.differing(root, first) if first in self.refused}
                self._shorten(probes)
                return
        if self.failure is not None:
            raise self.failure
        raise Refused("; ".join(list(dict.fromkeys(self.refused.values()))[:3]))

    def _shorten(self, probes: Sequence[int]) -> None:
        """Leave out micro-batches whose traces would be far longer than those that were made."""
        known = {micro: found.events for (_, micro), found in self.found.items()}
        if len(known) < 2:
            return
        low, high = probes
        each = max(known[high] - known[low], 0) / (high - low)
        kept = [size for size in self.sizes if size <= high or each * (size - high) <= LONGER]
        if kept != self.sizes:
            self.notes.append(f"micro-batches above {kept[-1]} were not looked at: the larger they are, the longer "
                              "their traces are here")
        self.sizes = kept

    def _explore(self, levels: Sequence[Level], spare: bool, *, first: bool = False) -> None:
        """Evaluate what may win, or, with `first`, until anything fits."""
        choices = [choice for choice in self.space.choices if self.space.level(choice) in levels]
        self.weighed = [choice for choice in self.weighed if self.space.level(choice) not in levels] + choices
        while not (first and self.best(1 if spare else 2) is not None) and (wanted := self._next(choices, spare)):
            self.evaluate(wanted)

    def _next(self, choices: Sequence[Choice], spare: bool) -> list[Pair]:
        """Pairs to evaluate next, as many as go side by side; each teaches something of its own."""
        promising = self._promising(choices, spare)
        promising.sort(key=lambda p: (p.fits, p.speed, -self.space.departures(p.choice)), reverse=True)
        wanted: list[Pair] = []
        taught: set[Unknown] = set()
        for promise in promising:
            if taught.isdisjoint(promise.unknown):
                wanted.append((promise.choice, promise.micro))
                taught.update(promise.unknown)
        return wanted[: self.evaluator.side_by_side]

    def _promising(self, choices: Sequence[Choice], spare: bool) -> list[Promise]:
        """Combinations that may still be chosen."""
        worst = 1 if spare else 2
        best = self.best(worst)
        to_beat = {level: self._to_beat(level, best, worst) for level in set(map(self.space.level, choices))}
        return [promise for choice in choices if (promise := self._promise(choice, spare)) is not None
                and promise.speed > to_beat[self.space.level(choice)]]

    def _to_beat(self, level: Level, best: Pair | None, worst: int) -> float:
        """Samples a second above which a combination of such numerics would be chosen: milder than the best one nearly
        its speed, else more than the clock's error above the fastest as mild."""
        if best is None:
            return 0.0
        of_best = self.space.level(best[0])
        if level < of_best:
            return self.speed(best) / (1 + CLOCK_ERROR)
        alike = [pair for pair, found in self.found.items()
                 if found.fit_rank <= worst and self.space.level(pair[0]) == of_best]
        return (1 + CLOCK_ERROR) * max(map(self.speed, alike))

    def _promise(self, choice: Choice, spare: bool) -> Promise | None:
        """Speed that a combination can still reach; None where it fits nowhere or is outdone."""
        if choice in self.refused or self._outdone(choice):
            return None
        worst = 0 if spare else 2
        known = {micro: found.fit_rank <= worst for (other, micro), found in self.found.items() if other == choice}
        above = max((micro for micro, fits in known.items() if fits), default=0)
        below = min((micro for micro, fits in known.items() if not fits and micro > above), default=1 << 62)
        forecast, batch = self.forecasts.of(choice), self.space.recipe.batch_size
        open_sizes = [micro for micro in self.sizes  # a step's only micro-batch finds no gradients
                      if above < micro and micro not in known and (micro < below or micro == batch)]
        room, rounding = self.room(spare), self.rounding(choice)
        fitting = [micro for micro in open_sizes if forecast.best.peak(micro, batch) * rounding <= room]
        if not fitting:
            return None
        seconds = self._in_run(forecast.best.step_seconds(fitting[-1], batch), self.space.on(choice, fitting[-1]))
        likely = [micro for micro in fitting if forecast.likely.peak(micro, batch) * rounding <= room] or fitting[:1]
        micro = likely[-1]
        if forecast.likely.seconds.slope:  # else nothing is known of other micro-batches' times
            enough = forecast.likely.step_seconds(micro, batch) * (1 + NO_GAIN)
            micro = next(micro for micro in likely if forecast.likely.step_seconds(micro, batch) <= enough)
        fits = forecast.likely.peak(micro, batch) * rounding <= room
        return Promise(choice, micro, batch / max(seconds, 1e-12), fits, forecast.unknown)

    def _outdone(self, choice: Choice) -> bool:
        """Whether it holds a value that cannot be built, or one that another is declared to beat in memory and time."""
        for at, (field, value) in enumerate(zip(self.space.fields, choice, strict=True)):
            if (field, value) in self._broken:
                return True
            better = self.space.outdoing(field, value)
            unbuilt = (field, better) in self._broken or (*choice[:at], better, *choice[at + 1 :]) in self.refused
            if better is not None and not unbuilt:
                return True
        return False

    def _plainer(self) -> None:
        """Evaluate the choice with each of its departures undone, where that may be as fast."""
        best = self.best()
        if best is None:
            return
        batch, room = self.space.recipe.batch_size, self.room(self.found[best].fit_rank < 2)
        for other in self.space.undone(best[0]):
            known = other in self.refused or any(choice == other for choice, _ in self.found)
            if known or other not in self.space.choices:
                continue
            forecast = self.forecasts.of(other).best
            as_fast = batch / forecast.step_seconds(best[1], batch) * (1 + CLOCK_ERROR) >= self.speed(best)
            if as_fast and forecast.peak(best[1], batch) * self.rounding(other) <= room:
                self.evaluate([(other, best[1])])

    def _thriftiest(self, levels: Sequence[Level]) -> None:
        """Where nothing is known to fit: evaluate what is likeliest to need least, until it is known."""
        batch = self.space.recipe.batch_size
        ends = sorted({self.sizes[0], self.sizes[-1]} if self.sizes[-1] == batch else {self.sizes[0]})
        self.weighed = [choice for choice in self.space.choices if self.space.level(choice) <= levels[-1]]
        for _ in range(3):
            forecasts = self.forecasts
            pairs = [(c, m) for c in self.weighed if c not in self.refused for m in ends]
            least = min(pairs, key=lambda p: forecasts.of(p[0]).likely.peak(p[1], batch), default=None)
            if least is None or least in self.found:
                return
            self.evaluate([least])

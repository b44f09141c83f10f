"""Choosing: best first among the combinations of a space, until none left can win by more than the clock's own error.

The mildest level of numerics is looked at first, a harsher one where the recipe allows it or nothing milder fits. What
is evaluated next is what can be fastest, by what was evaluated before and what techniques declare (see `outlook`); so
much is traced as it is, at a real micro-batch, and nothing that is shown is interpolated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.defaults import default_micro_batch
from tightfit.planning.search.evaluate import Evaluated, Evaluator, Progress
from tightfit.planning.search.outlook import Outlooks, Unknown
from tightfit.planning.search.space import ALLOCATOR, LAST_RESORT, Choice, Level, Space, named
from tightfit.recipe import Recipe
from tightfit.techniques import SLOTS, Technique

CLOCK_ERROR = 0.05
"""The share by which predicted times of two recipes of one model have to differ for one to be called faster. Of pairs
that differ in one field, predicted and measured ratios are 4 to 5 % apart at the median (results/search_quality.json);
single times are off by 19 to 26 %."""
ROOTS = 4
"""Combinations that are tried until one can be built."""
LONGER = 50_000
"""Ops and allocations by which a trace may outgrow the first ones, as those of packed documents on a processor do."""

Pair = tuple[Choice, int]


class Promise(NamedTuple):
    """speed: the most samples a second that a combination can reach. micro: where to evaluate it. unknown: what no
    evaluated combination tells of it."""

    speed: float
    micro: int
    unknown: tuple[Unknown, ...]


class Spent(Exception):
    """No more may be traced."""


class Exploration:
    """A search under way.

    found: what was evaluated, by combination and micro-batch. refused: what could not be built, and why. limit: traces
    at most, a compiled one counted as several; `kept_back` of them are left for what `explain` asks. for_run: whether
    the choice is for a run of `max_steps`, which pays for what comes before its first step. mildest: never take harsher
    numerics for speed.
    """

    def __init__(
        self, space: Space, evaluator: Evaluator, *, limit: int, kept_back: int, progress: Progress | None = None,
        for_run: bool = False, mildest: bool = False,
    ) -> None:  # fmt: skip
        self.space, self.evaluator, self.progress, self.for_run = space, evaluator, progress, for_run
        self.device = space.device
        self.limit, self.kept_back, self.mildest = limit, kept_back, mildest
        self.found: dict[Pair, Evaluated] = {}
        self.beside: list[tuple[Device, Evaluated]] = []
        """What was evaluated for answers alone, and where."""
        self.refused: dict[Choice, str] = {}
        self.failure: ModelError | None = None
        self.sizes = list(space.sizes)
        self.weighed: list[Choice] = []
        self.notes: list[str] = []
        self.spent = self.made = 0
        self._broken: set[Unknown] = set()
        self._outlooks: Outlooks | None = None

    # Running

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
            self.notes.append(f"combinations that might be better and were not traced: {len(self._left()):,}; the "
                              f"limit of {self.limit} traces was reached")
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
        roots = [choice for choice in space.choices if space.departures(choice) <= 1 and space.level(choice) == (0, 0)]
        roots.sort(key=lambda root: [space.fields.index(field) for field in space.differing(root, space.plain)])
        for root in (roots or space.choices)[:ROOTS]:
            self.evaluate([(root, micro) for micro in probes])
            if any(choice == root for choice, _ in self.found):
                self._broken |= {(field, space.plain[space.fields.index(field)])
                                 for field in space.differing(root, space.plain) if space.plain in self.refused}
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

    def _next(self, choices: Iterable[Choice], spare: bool) -> list[Pair]:
        """What to evaluate next, as many as go side by side; each teaches something of its own."""
        worst = 1 if spare else 2
        best = self.best(worst)
        promising = []
        for choice in choices:
            promise = self._promise(choice, spare)
            if promise is not None and (best is None or promise.speed > self._to_beat(choice, best, worst)):
                order = promise.speed if best is not None else self.space.thrift(choice)  # first something that fits
                promising.append((order, -self.space.departures(choice), choice, promise))
        promising.sort(key=lambda p: p[:2], reverse=True)
        wanted: list[Pair] = []
        taught: set[Unknown] = set()
        for _, _, choice, promise in promising:
            if len(wanted) < self.evaluator.side_by_side and taught.isdisjoint(promise.unknown):
                wanted.append(self._quicker(choice, promise))
                taught.update(promise.unknown or {("", choice)})
        return wanted

    def _to_beat(self, choice: Choice, best: Pair, worst: int) -> float:
        """Samples a second above which a combination would be chosen: milder than the best one nearly its speed, else
        more than the clock's error above the fastest as mild."""
        level, of_best = self.space.level(choice), self.space.level(best[0])
        if level < of_best:
            return self.speed(best) / (1 + CLOCK_ERROR)
        alike = [pair for pair, found in self.found.items()
                 if found.fit_rank <= worst and self.space.level(pair[0]) == of_best]
        return (1 + CLOCK_ERROR) * max(map(self.speed, alike))

    def _quicker(self, choice: Choice, promise: Promise) -> Pair:
        """What teaches as much of a combination of which something is not known, and takes less time to trace; else the
        combination itself."""
        plain = tuple(usual if getattr(value, "trace_cost", 1) > 1 else value
                      for value, usual in zip(choice, self.space.plain, strict=True))
        served = plain in self.space.choices and plain not in self.refused and not self._dominated(plain)
        if promise.unknown and served and set(self.outlooks.of(plain).unknown) & set(promise.unknown):
            return plain, promise.micro
        return choice, promise.micro

    def _promise(self, choice: Choice, spare: bool) -> Promise | None:
        """What a combination can reach beyond what was evaluated of it; None where it fits nowhere or is dominated."""
        if choice in self.refused or self._dominated(choice):
            return None
        worst = 0 if spare else 2
        known = {micro: found.fit_rank <= worst for (other, micro), found in self.found.items() if other == choice}
        above = max((micro for micro, fits in known.items() if fits), default=0)
        below = min((micro for micro, fits in known.items() if not fits and micro > above), default=1 << 62)
        outlook, batch = self.outlooks.of(choice), self.space.recipe.batch_size
        open_sizes = [micro for micro in self.sizes  # a step's only micro-batch finds no gradients
                      if above < micro and micro not in known and (micro < below or micro == batch)]
        room, rounding = self.room(spare), self.rounding(choice)
        fitting = [micro for micro in open_sizes if outlook.best.peak(micro, batch) * rounding <= room]
        if not fitting:
            return None
        seconds = self._in_run(outlook.best.step_seconds(fitting[-1], batch), self.space.on(choice, fitting[-1]))
        likely = [micro for micro in fitting if outlook.likely.peak(micro, batch) * rounding <= room]
        speed = batch / seconds if seconds > 0 else float("inf")
        return Promise(speed, likely[-1] if likely else fitting[0], outlook.unknown)

    def _dominated(self, choice: Choice) -> bool:
        """Whether it holds a value that cannot be built, or one that another beats in time and memory both."""
        for at, (field, value) in enumerate(zip(self.space.fields, choice, strict=True)):
            if (field, value) in self._broken:
                return True
            if not isinstance(value, Technique) or value.changes_states:
                continue
            faster = value.slower_than(self.space.device)
            for other in self.space.values[field]:
                if other.name == faster and other.thrift >= max(value.thrift, 1) and not value.slowdown:
                    counterpart = (*choice[:at], other, *choice[at + 1 :])
                    if (field, other) not in self._broken and counterpart not in self.refused:
                        return True
        return False

    def _plainer(self) -> None:
        """Evaluate the choice with each of its departures undone, where that may be as fast."""
        best = self.best()
        if best is None:
            return
        for other in self.space.undone(best[0]):
            if other not in self.space.choices or any(choice == other for choice, _ in self.found):
                continue
            promise = self._promise(other, self.found[best].fit_rank < 2)
            if promise is not None and promise.speed * (1 + CLOCK_ERROR) >= self.speed(best):
                self.evaluate([(other, promise.micro)])

    def _thriftiest(self, levels: Sequence[Level]) -> None:
        """Where nothing is known to fit: evaluate what is likeliest to need least, until it is known."""
        batch = self.space.recipe.batch_size
        ends = sorted({self.sizes[0], self.sizes[-1]} if self.sizes[-1] == batch else {self.sizes[0]})
        self.weighed = [choice for choice in self.space.choices if self.space.level(choice) <= levels[-1]]
        for _ in range(3):
            outlooks = self.outlooks
            pairs = [(c, m) for c in self.weighed if c not in self.refused and not self._dominated(c) for m in ends]
            least = min(pairs, key=lambda p: outlooks.of(p[0]).likely.peak(p[1], batch), default=None)
            if least is None or least in self.found:
                return
            self.evaluate([least])

    # What is known

    @property
    def outlooks(self) -> Outlooks:
        """Of what was evaluated so far."""
        if self._outlooks is None:
            points: dict[Choice, dict[int, Evaluated]] = {}
            for (choice, micro), found in self.found.items():
                points.setdefault(choice, {})[micro] = found
            self._outlooks = Outlooks(self.space, points)
        return self._outlooks

    def room(self, spare: bool) -> int:
        """Bytes for the allocator, less the margin where `spare` is to stay."""
        memory = next(iter(self.found.values())).estimate.memory
        return memory.capacity - (memory.margin if spare else 0)

    def rounding(self, choice: Choice) -> float:
        """The least that the allocator was seen to reserve at a peak, over what was asked of it there."""
        asked = self.space.on(choice, 1).expandable_segments
        alike = [found for found in self.found.values() if found.recipe.expandable_segments == asked]
        return max(min((f.estimate.memory.peak_reserved / max(f.passes, f.elsewhere, 1) for f in alike), default=1.0),
                   1.0)

    def speed(self, pair: Pair) -> float:
        """Samples a second; of a run, with what comes before its first step spread over its steps."""
        found = self.found[pair]
        return self.space.recipe.batch_size / max(self._in_run(found.seconds, found.recipe), 1e-12)

    def _in_run(self, seconds: float, recipe: Recipe) -> float:
        return seconds + (startup(recipe) / recipe.max_steps if self.for_run else 0.0)

    def best(self, worst: int = 2) -> Pair | None:
        """The choice among what was evaluated and fits so well: of the mildest numerics, unless a harsher level gains
        more than the clock's error."""
        ranks = [rank for rank in ((0, 1), (2,)) if rank[0] <= worst]
        for group in ranks:
            fitting = [pair for pair, found in self.found.items() if found.fit_rank in group]
            winner: Pair | None = None
            for level in sorted({self.space.level(choice) for choice, _ in fitting}):
                local = self._pick([pair for pair in fitting if self.space.level(pair[0]) == level])
                if winner is None or (level[0] < LAST_RESORT and not self.mildest
                                      and self.speed(local) > (1 + CLOCK_ERROR) * self.speed(winner)):
                    winner = local
            if winner is not None:
                return winner
        return None

    def _pick(self, pairs: Sequence[Pair]) -> Pair:
        """Of one level the plainest of what is as fast as the fastest; what needs no retries first."""
        rank = min(self.found[pair].fit_rank for pair in pairs)
        pairs = [pair for pair in pairs if self.found[pair].fit_rank == rank]
        enough = max(map(self.speed, pairs)) / (1 + CLOCK_ERROR)
        as_fast = [pair for pair in pairs if self.speed(pair) >= enough]
        return min(as_fast, key=lambda pair: (self.space.departures(pair[0]), -self.speed(pair),
                                              self.found[pair].estimate.memory.used))

    def _left(self) -> list[Choice]:
        """What might still be better."""
        best = self.best()
        least = 0.0 if best is None else (1 + CLOCK_ERROR) * self.speed(best)
        promises = ((choice, self._promise(choice, best is None)) for choice in self.weighed)
        return [choice for choice, promise in promises if promise is not None and promise.speed > least]

    # Evaluating

    def evaluate(self, pairs: Iterable[Pair], needed: bool = True) -> None:
        """Evaluate what was not. Raises Spent where that is too much."""
        wanted = [pair for pair in pairs if pair not in self.found and pair[0] not in self.refused]
        recipes = [self.space.on(choice, micro) for choice, micro in wanted]
        for recipe in recipes:
            if not self._traced(recipe):
                self.count(recipe, named(recipe, None, self.shown))
        for pair, outcome in zip(wanted, self.evaluator([(r, self.space.device) for r in recipes]), strict=True):
            if isinstance(outcome, Evaluated):
                self.found[pair] = outcome
                continue
            if not isinstance(outcome, Refused | ModelError):
                raise outcome
            self.refused[pair[0]] = str(outcome)
            if isinstance(outcome, ModelError):
                self.failure = self.failure or outcome
            self._blame(pair[0])
        self._outlooks = None

    def count(self, recipe: Recipe, text: str) -> None:
        """Count a recipe that is to be traced, and report it as `text`. Raises Spent where that is too much."""
        if self.spent >= self.limit - self.kept_back and self.found:
            raise Spent
        if self.progress is not None:
            self.progress(self.made, max(self.limit, self.made + 1), text)
        self.made += 1
        self.spent += max(getattr(recipe, slot).trace_cost for slot in SLOTS)

    def _traced(self, recipe: Recipe) -> bool:
        """Whether it was traced already, for an allocator set otherwise."""
        passes = recipe.model_copy(update={ALLOCATOR: False})
        return any(found.recipe.model_copy(update={ALLOCATOR: False}) == passes for found in self.found.values())

    @property
    def shown(self) -> tuple[str, ...]:
        """The fields that the search decides, for reading."""
        return ("micro_batch_size", *(field for field in self.space.fields if field != ALLOCATOR))

    def _blame(self, choice: Choice) -> None:
        """Hold the one value against it in which a combination that cannot be built differs from one that can."""
        working = {c for c, _ in self.found}
        for other in working:
            fields = self.space.differing(choice, other)
            if len(fields) == 1:
                at = self.space.fields.index(fields[0])
                if all(c[at] != choice[at] for c in working):
                    self._broken.add((fields[0], choice[at]))


def startup(recipe: Recipe) -> float:
    """Seconds before the first step of a resolved recipe, such as a compiler's."""
    return max(float(getattr(recipe, slot).startup_seconds) for slot in SLOTS)

"""Choosing: every `auto` field of a recipe at once, the global batch fixed.

The combination of the most predicted tokens a second among those that fit with a margin to spare, where each departure
from the plainest has to be worth its while: it counts as HANDICAP slower. Of those within TIE the one that takes least
memory is taken. A combination is traced only where `bounds` leaves it a gain of GAIN; the one chosen is traced itself
in the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.plan import Estimate
from tightfit.planning.search.bounds import Bounds
from tightfit.planning.search.budget import Spent
from tightfit.planning.search.candidates import Config, configs, departures_of, scopes, thriftiest
from tightfit.planning.search.found import Found
from tightfit.planning.search.probing import Prober
from tightfit.recipe import Recipe
from tightfit.techniques import Attention
from tightfit.techniques.checkpointing import EveryBlock
from tightfit.techniques.compile import NoCompile

HANDICAP = 0.02
"""The share of its speed that a combination is docked for each departure from the plainest: changed numerics, a
compiler, checkpointing, an unusual precision. Predictions are not more certain than that."""

TIE = 0.005
"""The share of the best score up to which combinations are as good, and the one that takes least memory is taken."""

GAIN = 0.01
"""What a combination that is not known yet has to promise, to be traced."""

TELLING = ("selective", "memory-budget", "attention", "mlp", "every-nth")
"""Kinds of checkpointing in the order in which they are tried: those that cost the least time first."""

COMPILE_AFTER = 300.0
"""Predicted seconds of a whole run from which on a compiler is tried: compiling takes up to a minute."""

VERIFIED = 3
"""How many winners may be traced before the search settles."""

NEAR = 0.1
"""The share of its memory by which a compiled step may need less at a small micro-batch than larger ones tell: it is
partitioned otherwise there. What misses by no more is traced, until one did miss."""


class Exploration:
    """A search under way. found: what was costed so far."""

    def __init__(self, recipe: Recipe, device: Device, prober: Prober) -> None:
        self.recipe, self.device, self.prober = recipe, device, prober
        self.bounds = Bounds(prober)
        self.found: dict[tuple[Config, int], Found] = {}
        self.weighed: set[Config] = set()
        self.attention: Attention | None = None
        """The kernel whose combinations were weighed first, where the recipe leaves it open."""
        self._settled: set[Config] = set()
        self._untraced: set[Config] = set()
        self._doubted: dict[Config, bool] = {}
        self._limit = ""
        self._unverified = False
        self._spare = True
        self._doubting = True

    def run(self, attention: Attention | None = None) -> None:
        """Explore as far as needed: what changes numerics only where it is allowed, or where nothing else fits.

        attention: the kernel, where the recipe leaves it open; run again, another's combinations are weighed too.
        """
        self.attention = self.attention or attention
        for self._spare in (True, False):
            self._settled.clear()
            worst = 1 if self._spare else 2
            for scope in scopes(self.recipe.allow_numerics):
                if scope.only_where_nothing_fits and self.best(worst) is not None:
                    continue
                self._explore(configs(self.recipe, self.device, scope, attention))
            if self.best(worst) is not None:
                return

    def resort(self) -> None:
        """Where nothing is known to fit: cost the thriftiest combination of each scope, which a limit on traces may
        have left out, until one fits."""
        for scope in scopes(self.recipe.allow_numerics):
            least = thriftiest(configs(self.recipe, self.device, scope, self.attention))
            if self.best() is None and least is not None and least not in self._settled and not self._hopeless(least):
                self.prober.plain.setdefault(least.family, least)
                with contextlib.suppress(Spent):
                    self._settle(least)

    @property
    def notes(self) -> list[str]:
        """What was left out, as sentences."""
        notes, best = [], self.best()
        untraced = sum(not self.prober.knows(config) for config in self._untraced)
        if untraced:
            notes.append(f"combinations that might be better and were not traced: {untraced:,}; {self._limit}")
        if self.prober.sizes[-1] < self.prober.largest:
            notes.append(f"micro-batches above {self.prober.sizes[-1]} were not looked at: the larger they are, the "
                         "longer their traces are here")
        compiled = {config for config in self.weighed if config.compiled}
        if best is not None and self._too_short(best) and compiled and compiled.isdisjoint(c for c, _ in self.found):
            notes.append(f"compile: not weighed, for the whole run takes {self._whole_run(best):,.0f} seconds by this "
                         "plan, and compiling up to a minute; compile=per-block weighs it")
        if self._unverified:
            notes.append("the chosen recipe's own trace was left out: the limit on traces was reached")
        return notes

    def best(self, worst_tier: int = 2) -> Found | None:
        """The choice among what was found, of the best tier up to `worst_tier`."""
        for tier in range(worst_tier + 1):
            chosen = self._choose([f for f in self.found.values() if f.tier == tier])
            if chosen is not None:
                return chosen
        return None

    def verify(self) -> None:
        """Trace the very recipe that is chosen, until the choice stands; before it, near misses that a limit left."""
        doubted, self._doubted, spare = self._doubted, {}, self._spare
        for config, self._spare in doubted.items():
            with contextlib.suppress(Spent):
                self._settle(config)
        self._spare = spare
        self._polish()
        for _ in range(VERIFIED):
            best = self.best()
            if best is None or self.prober.verified(best.config, best.micro):
                return
            try:
                estimate = self.prober.verify(best.config, best.micro)
                self._note(best.config, best.micro, estimate)
                if self.found[best.config, best.micro].tier > best.tier:
                    self._smaller(best)
            except Spent:
                self._unverified = True
                return
            except (Refused, ModelError) as error:
                del self.found[best.config, best.micro]
                self.prober.refused[best.config] = str(error)

    def fill(self, wanted: int) -> None:
        """Cost other kinds of checkpointing beside the choice, until there is something to compare it with; where a
        compiler is left open without one, whose traces take long."""
        best = self.best()
        if best is None:
            return
        self._spare = best.tier < 2
        like = self._uncompiled(best.config)
        for kind in ("none", "every-block", "selective"):
            beside = [c for c in self.weighed - self._settled if c.checkpointing.name == kind
                      and c == like.with_checkpointing(c.checkpointing)]
            if beside and len({f.config for f in self.found.values() if f.tier < 3}) < wanted:
                with contextlib.suppress(Spent):
                    self._settle(min(beside, key=repr))

    def _uncompiled(self, config: Config) -> Config:
        """The combination without a compiler, where that is left open."""
        return replace(config, compile=NoCompile()) if self.recipe.compile == "auto" else config

    def _explore(self, choices: Sequence[Config]) -> None:
        for config in choices:
            self.prober.plain.setdefault(config.family, config)
        self.weighed.update(choices)
        waiting: list[Config] = []
        try:
            while True:
                waiting = [c for c in choices if c not in self._settled and not self._hopeless(c)]
                if not waiting:
                    return
                following = max(waiting, key=self._promise)
                self._settle(self._telling(following) or following)
        except Spent:
            self._untraced.update(waiting)
            budget = self.prober.budget
            self._limit = (f"the limit of {budget.allowed} traces was reached" if budget.reached else
                           "traces are large here, and the limit of what they may hold was reached")

    def _promise(self, config: Config) -> tuple[bool, float, int]:
        """What to look at first: something without a compiler, then what is likely to be fastest, then what tells most
        about the others."""
        uncompiled = any(not f.config.compiled for f in self.found.values())
        first = not config.compiled and not uncompiled
        bounds = self.bounds
        limit = bounds.speed(config, spare=self._spare) * self._discount(config) * bounds.certainty(config)
        kind = config.checkpointing
        if kind == self.prober.plain[config.family].checkpointing:
            order = 2 * len(TELLING)
        elif isinstance(kind, EveryBlock):
            order = 2 * len(TELLING) - 1
        else:
            order = len(TELLING) - TELLING.index(kind.name) if kind.name in TELLING else 0
        return first, limit, order

    def _telling(self, config: Config) -> Config | None:
        """What is to be costed before a combination of which nothing is known: in a family that is unknown itself, the
        one without checkpointing; before a kind of checkpointing every-block's, which bounds the memory of all, and
        where a compiler is left open first without it, for that trace is quicker."""
        prober, bounds = self.prober, self.bounds
        plain = prober.plain[config.family]
        if not prober.knows(plain):
            unchecked = config.with_checkpointing(plain.checkpointing)
            return None if unchecked in self._settled else unchecked
        if self.recipe.checkpointing != "auto" or config == plain or bounds.carried(config):
            return None
        floor = prober.reference(config).with_checkpointing(EveryBlock())
        quicker = self._uncompiled(floor)
        if quicker not in self._settled and prober.knows(prober.plain[quicker.family]):
            return quicker
        return None if floor in self._settled or self._hopeless(floor) else floor

    def _hopeless(self, config: Config) -> bool:
        """Whether it cannot become the choice."""
        if self.prober.sample() is None:
            return False
        limit = self.bounds.speed(config, spare=self._spare) * self._discount(config)
        best = self._choose([f for f in self.found.values() if f.tier <= (0 if self._spare else 2)])
        if best is None:
            return limit == 0.0
        if config.compiled and self._too_short(best):
            return True
        return limit < (1 + GAIN) * self.score(best)

    def _too_short(self, best: Found) -> bool:
        """Whether a run by the best so far ends before a compiler would pay, where one is left open."""
        left_open = self.recipe.compile == "auto" and not best.config.compiled
        return left_open and self._whole_run(best) < COMPILE_AFTER

    def _whole_run(self, found: Found) -> float:
        return found.estimate.time.step_seconds * self.recipe.max_steps

    def _settle(self, config: Config) -> None:
        """Cost a combination at the largest micro-batch that fits."""
        self._settled.add(config)
        prober = self.prober
        if not prober.probe(config):
            return
        try:
            for micro in reversed(prober.sizes):
                doubtful = self._doubting and prober.doubtful(config, micro)
                least = (1 - NEAR if doubtful else 1) * prober.peak(config, micro)
                if least > prober.room(config, spare=self._spare):
                    continue
                if self._fits(config, micro, prober.estimate(config, micro)):
                    return
                if doubtful:
                    self._doubting = self._fits(config, micro, self._verified(config, micro))
                    if self._doubting:
                        return
        except (Refused, ModelError) as error:
            prober.refused[config] = str(error)

    def _verified(self, config: Config, micro: int) -> Estimate:
        """What a near miss costs, by a trace of its own; kept for `verify` where none may be made now."""
        try:
            return self.prober.verify(config, micro)
        except Spent:
            self._doubted.setdefault(config, self._spare)
            raise

    def _fits(self, config: Config, micro: int, estimate: Estimate) -> bool:
        self._note(config, micro, estimate)
        return self.found[config, micro].tier <= (0 if self._spare else 2)

    def _polish(self) -> None:
        """Try the winner at the next smaller micro-batch, which can be faster where tiles are cut badly, or as fast in
        less memory."""
        before = None
        with contextlib.suppress(Spent, Refused, ModelError):
            while (best := self.best()) is not None and best != before:
                self._smaller(best)
                before = best

    def _smaller(self, found: Found) -> None:
        below = [micro for micro in self.prober.sizes if micro < found.micro]
        if below and (found.config, below[-1]) not in self.found:
            self._note(found.config, below[-1], self.prober.estimate(found.config, below[-1]))

    def _note(self, config: Config, micro: int, estimate: Estimate) -> None:
        self.found[config, micro] = Found(config, micro, estimate)

    def score(self, found: Found) -> float:
        """Samples a second, docked for what is not plain."""
        return found.speed * self._discount(found.config)

    def _choose(self, among: Sequence[Found]) -> Found | None:
        enough = (1 - TIE) * max(map(self.score, among), default=0.0)
        as_good = [f for f in among if self.score(f) >= enough]
        return min(as_good, key=lambda f: (f.estimate.memory.used, -self.score(f), -f.micro), default=None)

    def _discount(self, config: Config) -> float:
        departures = sum(departures_of(self.recipe, self.device, config))
        return float((1 - HANDICAP) ** departures)

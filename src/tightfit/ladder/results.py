"""A ladder's results as they are shown: one for each rung and runner, with its baseline; factors, the front, ratios."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from tightfit.ladder.catalogue import Words, guides
from tightfit.ladder.peers import title_of
from tightfit.ladder.rows import OURS, Measured, Predicted, Row, input_fingerprint
from tightfit.ladder.run import LadderRun
from tightfit.ladder.rungs import UNKNOWN, Figures, Ladder, Rung, card_name

TOLERANCES = {"fp32": 0.01, "fp16": 0.05, "bf16": 0.05, "bf16-pure": 0.1}
"""Distance of two loops' losses, in nats, step by step, up to which they are the same work."""
QUANTILES = {"least": 0.0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "most": 1.0}


@dataclass(frozen=True, kw_only=True)
class RungResult:
    """One rung by one runner.

    measured: None where it has not run. predicted: for this machine's device, at the scale that ran. full: at full size
    for the card that was asked for. baseline: the measured rung that its factors are of: of a peer's, our own run.
    other_work: why a peer's row is not the same work as ours; empty where it is, and for our own.
    same_as: an earlier rung that came to the same recipe, so that the two differ by noise alone; empty where none did.
    spread, baseline_spread: the seconds a sample between which half of its timed steps lie and half of those of every
    rung of its recipe, and the baseline's.
    """

    ladder: Ladder
    rung: Rung
    runner: str
    measured: Measured | None
    predicted: Predicted | None = None
    full: Predicted | None = None
    baseline: Measured | None = None
    other_work: str = ""
    same_as: str = ""
    spread: tuple[float, float] | None = None
    baseline_spread: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        return self.rung.name if self.runner == OURS else f"{self.rung.name} ({title_of(self.runner)})"

    @property
    def ran(self) -> bool:
        """Whether it has figures."""
        return self.measured is not None and bool(self.measured.seconds)

    @property
    def memory_bytes(self) -> float:
        """Bytes by the account of the published figures; 0 where it did not run."""
        return figures_of(self.measured, self.ladder).memory or 0.0

    @property
    def samples_per_second(self) -> float:
        """0 where it did not run."""
        return self.measured.samples_per_second if self.measured else 0.0

    @property
    def speed(self) -> float | None:
        """Samples a second, as a factor of the baseline's; None where either did not run."""
        return self._factor("samples_per_second")

    @property
    def memory(self) -> float | None:
        """Peak memory, as a factor of the baseline's; None where either did not run."""
        return self._factor("peak_reserved")

    @property
    def is_noise(self) -> bool:
        """Whether its spread and its baseline's lie over one another."""
        if self.spread is None or self.baseline_spread is None:
            return False
        (low, high), (least, most) = self.spread, self.baseline_spread
        return low <= most and least <= high and (low < high or least < most)

    def _factor(self, figure: str) -> float | None:
        base = getattr(self.baseline, figure, 0)
        return getattr(self.measured, figure) / base if base and self.ran else None


def rung_results(run: LadderRun) -> list[RungResult]:
    """The ladder's results in its order; of each rung ours first, then the peers that ran it."""
    found, steps = list[RungResult](), dict[str, dict[str, Measured]]()
    for rung in run.ladder.rungs:
        if (row := run.measured(rung, OURS)) is not None and row.status == "done":
            steps.setdefault(_step(rung, row), {})[rung.name] = row
    alike = {name: rows for rows in steps.values() for name in rows}
    for rung in run.ladder.rungs:
        ours, same = run.measured(rung, OURS), alike.get(rung.name, {})
        first, spread = next(iter(same), rung.name), _spread(same.values())
        found.append(RungResult(
            ladder=run.ladder, rung=rung, runner=OURS, measured=ours,
            predicted=run.predicted(rung, run.machine.device, run.scale),
            full=None if run.gpu is None else run.predicted(rung, run.gpu, "full"),
            baseline=None if rung.against is None else run.measured(run.ladder.rung(rung.against), OURS),
            same_as="" if first == rung.name else first, spread=spread,
            baseline_spread=_spread(alike.get(rung.against or "", {}).values()),
        ))  # fmt: skip
        found += [RungResult(ladder=run.ladder, rung=rung, runner=runner, measured=theirs, baseline=ours,
                             other_work=other_work(ours, theirs), spread=_spread([theirs]), baseline_spread=spread)
                  for runner in run.runners if runner != OURS and (theirs := run.measured(rung, runner)) is not None]
    return found


def _step(rung: Rung, measured: Measured) -> str:
    """A digest of the step that a rung ran, the same for equal recipes."""
    # what the planner may choose from is no part of the step that it chose
    step = {name: value for name, value in measured.recipe.items() if name != "allow_numerics"}
    return input_fingerprint(step, launch=rung.launch)


def _spread(rows: Iterable[Measured]) -> tuple[float, float] | None:
    """The least and the most of the rows' quartiles, in seconds a sample; None where none ran."""
    ends = [seconds / max(row.samples, 1) for row in rows if row.seconds for seconds in row.quartiles]
    return (min(ends), max(ends)) if ends else None


def other_work(ours: Measured | None, theirs: Measured) -> str:
    """The reason why a peer's row is not the same work as ours, by the losses of each step; empty where it is."""
    if ours is None or not ours.losses or not theirs.losses:
        return ""
    if len(ours.losses) != len(theirs.losses):
        return f"not the same work: {len(theirs.losses)} steps, ours {len(ours.losses)}"
    precision = ours.recipe.get("precision")
    name = precision.get("name", "fp32") if isinstance(precision, dict) else str(precision)
    apart, step = max((abs(a - b), step) for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)))
    if apart <= TOLERANCES.get(name, max(TOLERANCES.values())):
        return ""
    return (f"not the same work: at step {step + 1} its loss is {theirs.losses[step]:.4f}, ours "
            f"{ours.losses[step]:.4f}")


def heading(run: LadderRun) -> list[str]:
    """Sentences above the table: the machine, the scale, and what differs from what was published."""
    machine, ladder = run.machine, run.ladder
    libraries = [library for library in ladder.backend.libraries if library in machine.versions]
    said = [f"{ladder.title}", f"measured on {machine.device}"
            + (f" (driver {machine.driver})" if machine.driver else "")
            + "".join(f", {library} {machine.versions[library]}" for library in libraries)
            + ("; predicted (pred.) for the same" if any(row.device == machine.device for row in run.rows.predicted)
               else "")]
    if run.scale != "full":
        shrunk = ladder.shrunk.get(run.scale, {})
        fields = [*shrunk.get("model_overrides", {}).items(), *shrunk.items()]
        smaller = ", ".join(f"{name}={value}" for name, value in fields if name != "model_overrides")
        said.append(f"{run.scale} shape: {smaller}; memory is the allocator's peak of a step, and published "
                    "figures are of the full size")
    if run.gpu is not None:
        other = ladder.published_on and ladder.card_named and card_name(run.gpu) != ladder.published_card
        said.append(f"full size (full) predicted for {card_name(run.gpu)}"
                    + (", another card than that of publ." if other else ""))
    if ladder.published_on:
        said.append(f"published (publ.) on {ladder.published_on}")
    if run.overrides:
        said.append(f"every rung with {' '.join(run.overrides)}"
                    + ("; what was published is without" if ladder.published_on else ""))
    said += ladder.notes
    if others := sorted({row.machine.device for row in run.rows.measured} - {machine.device}):
        said.append(f"the results also hold rows of {', '.join(others)}, which are left out here")
    return said


def remarks(result: RungResult) -> list[str]:
    """Sentences on a result besides its figures."""
    ran, guess, full = result.measured, result.predicted, result.full
    said = [result.rung.note, result.other_work]
    if result.same_as:
        said.append(f"the same recipe as {result.same_as}: the two differ by noise alone")
    if ran is not None:
        said += [f"{ran.status}: {ran.reason}" if ran.status != "done" else "", *ran.notes]
        if ran.seconds and not ran.is_steady:
            low, high = ran.quartiles
            said.append(f"noisy: half of its {len(ran.seconds)} timed steps took {low:.3g} to {high:.3g} s, as where "
                        "other work shares the machine")
    if guess is not None and not guess.fits and (ran is None or ran.reason != guess.reason):
        said.append(f"not predicted: {guess.reason}")
    if full is not None and full.fits != "yes" and (ran is None or not full.reason or ran.reason != full.reason):
        words = {"with-retries": "fits only after the caching allocator has freed unused blocks",
                 "tight": "leaves less than the safety margin", "no": "does not fit"}
        said.append(f"at full size: {full.reason or words.get(full.fits, '')}")
    return [text for text in said if text]


def figures_of(row: Row | None, ladder: Ladder) -> Figures:
    """A row's seconds of a step, the median of those measured, and its bytes by the account of the published figures.
    """
    if row is None or row.status != "done":
        return UNKNOWN
    return Figures(row.median_seconds or None,
                   (row.driver_bytes if ladder.published_memory == "driver" else row.peak_allocated) or None)


def own(results: Iterable[RungResult]) -> list[RungResult]:
    """Our own results, one for each rung."""
    return [result for result in results if result.runner == OURS]


def front(results: Iterable[RungResult]) -> list[RungResult]:
    """The Pareto front of our results: none is faster without taking more memory. Least memory first."""
    found: list[RungResult] = []
    ran = [result for result in own(results) if result.ran]
    for result in sorted(ran, key=lambda result: (result.memory_bytes, -result.samples_per_second)):
        if not found or result.samples_per_second > found[-1].samples_per_second:
            found.append(result)
    return found


class Spread(NamedTuple):
    """Ours in a peer's over the rungs that are the same work, as QUANTILES. ratio: speed, or memory. rungs: how many.
    """

    peer: str
    ratio: str
    rungs: int
    values: list[float]


def spreads(results: Iterable[RungResult]) -> list[Spread]:
    """Comparison with each peer; none with one that has no rung of the same work."""
    same = [result for result in results if result.runner != OURS and not result.other_work]
    made = []
    for peer, ratio in product(dict.fromkeys(result.runner for result in same), ("speed", "memory")):
        factors = [1 / factor for result in same if result.runner == peer and (factor := getattr(result, ratio))]
        if factors:
            made.append(Spread(peer, ratio, len(factors), np.quantile(factors, [*QUANTILES.values()]).tolist()))
    return made


class Effect(NamedTuple):
    """A technique by the guides' words and by our results that show it; shown is empty where none does."""

    feature: str
    words: Words
    shown: tuple[RungResult, ...]

    @property
    def speed(self) -> str:
        return span(result.speed for result in self.shown)

    @property
    def memory(self) -> str:
        return span(result.memory for result in self.shown)


def effects(results: Sequence[RungResult]) -> list[Effect]:
    """Every technique of the guides in their order, with the results that show it."""
    ours = [result for result in own(results) if result.rung.against is not None]
    return [Effect(feature, words, tuple(result for result in ours if result.rung.feature == feature))
            for feature, words in guides().features.items()]


def span(factors: Iterable[float | None]) -> str:
    """Factors in words, such as `0.62x to 0.77x`; one alone where they agree, `not measured` where there is none."""
    known = [factor for factor in factors if factor is not None]
    if not known:
        return "not measured"
    least, most = times(min(known)), times(max(known))
    return least if least == most else f"{least} to {most}"


def times(factor: float | None) -> str:
    """A factor in words, such as `0.62x`; nothing where there is none."""
    return "" if factor is None else f"{factor:.2f}x"

"""A ladder as it is shown, in the terminal and on its page: one line for each rung and runner."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.ladder.cards import card_name, published_card
from tightfit.ladder.climbs import Climb
from tightfit.ladder.peers import title_of
from tightfit.ladder.rows import OURS, Measured, Predicted, key_of
from tightfit.ladder.rungs import Ladder, Rung, Scale

TOLERANCES = {"fp32": 0.01, "fp16": 0.05, "bf16": 0.05, "bf16-pure": 0.1}
"""How far the losses of two loops may lie apart, in nats, step by step, and still be the same work."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One rung by one runner.

    measured: None where it has not run. predicted: for this machine's device, of what ran. full: at full size for the
    card that was asked for. baseline: the measured rung that its effect is told by.
    same_work: why a peer's row is not the same work as ours; empty where it is, and for our own.
    same_as: an earlier rung that came to the same recipe, so that the two differ by noise alone; empty where none did.
    """

    rung: Rung
    runner: str
    measured: Measured | None
    predicted: Predicted | None = None
    full: Predicted | None = None
    baseline: Measured | None = None
    same_work: str = ""
    same_as: str = ""

    @property
    def name(self) -> str:
        return self.rung.name if self.runner == OURS else f"{self.rung.name} ({title_of(self.runner)})"

    @property
    def speed(self) -> float | None:
        """How many times as fast as the baseline; None where either did not run."""
        ran = self.measured
        if ran is None or self.baseline is None or not ran.seconds or not self.baseline.seconds:
            return None
        return ran.samples_per_second / self.baseline.samples_per_second

    @property
    def memory(self) -> float | None:
        """How many times the baseline's memory; None where either did not run."""
        ran = self.measured
        if ran is None or self.baseline is None or not ran.peak_reserved or not self.baseline.peak_reserved:
            return None
        return ran.peak_reserved / self.baseline.peak_reserved


def times(factor: float | None) -> str:
    """A factor in words, such as `0.62x`; nothing where there is none."""
    return "" if factor is None else f"{factor:.2f}x"


def lines(climb: Climb) -> list[Line]:
    """The ladder's lines in its order; of each rung ours first, then the peers that were asked for."""
    asked, found = climb.asked, list[Line]()
    first = dict[str, str]()
    for rung in asked.ladder.rungs:
        ours = climb.newest(rung, OURS)
        for runner in asked.runners:
            measured = climb.newest(rung, runner)
            if runner != OURS:
                if measured is not None:
                    found.append(Line(rung=rung, runner=runner, measured=measured, baseline=ours,
                                      same_work=differs(ours, measured)))
                continue
            against = None if rung.against is None else asked.ladder.rung(rung.against)
            found.append(Line(
                rung=rung, runner=runner, measured=measured,
                predicted=climb.prediction(rung, climb.machine.device, asked.scale),
                full=None if asked.gpu is None else climb.prediction(rung, asked.gpu, "full"),
                baseline=None if against is None else climb.newest(against, OURS),
                same_as=_same_as(first, rung, measured),
            ))  # fmt: skip
    return found


def _same_as(first: dict[str, str], rung: Rung, measured: Measured | None) -> str:
    """The first rung that ran by the same recipe, itself left aside; empty where it is the first, or did not run.

    first: the rungs so far, by what they ran; the rung is added.
    """
    if measured is None or measured.status != "done":
        return ""
    # what the planner may choose from is no part of the step that it chose
    step = {name: value for name, value in measured.recipe.items() if name != "allow_numerics"}
    name = first.setdefault(key_of(step, launch=rung.launch), rung.name)
    return "" if name == rung.name else name


def differs(ours: Measured | None, theirs: Measured) -> str:
    """Why a peer's row is not the same work as ours, by the losses of each step; empty where it is."""
    if ours is None or not ours.losses or not theirs.losses:
        return ""
    if len(ours.losses) != len(theirs.losses):
        return f"not the same work: {len(theirs.losses)} steps, ours {len(ours.losses)}"
    precision = ours.recipe.get("precision")
    name = precision.get("name", "fp32") if isinstance(precision, dict) else str(precision)
    allowed = TOLERANCES.get(name, max(TOLERANCES.values()))
    apart, step = max((abs(a - b), step) for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True), 1))
    if apart <= allowed:
        return ""
    return (f"not the same work: at step {step} its loss is {theirs.losses[step - 1]:.4f}, ours "
            f"{ours.losses[step - 1]:.4f}")


def heading(climb: Climb) -> list[str]:
    """Sentences above the table: the machine, the scale, and what differs from what was published."""
    asked, machine, ladder = climb.asked, climb.machine, climb.asked.ladder
    libraries = [library for library in ladder.backend.libraries if library in machine.versions]
    said = [f"{ladder.title}", f"measured on {machine.device}"
            + (f" (driver {machine.driver})" if machine.driver else "")
            + "".join(f", {library} {machine.versions[library]}" for library in libraries)
            + ("; pred. is for it too" if any(row.device == machine.device for row in climb.rows.predicted) else "")]
    if asked.scale != "full":
        said.append(f"{asked.scale} shape: {smaller(ladder, asked.scale)}; memory is the allocator's peak of a step, "
                    "and published figures are of the full size")
    if asked.gpu is not None:
        other = ladder.published_on and ladder.card_named and card_name(asked.gpu) != published_card(ladder)
        said.append(f"full size (full) predicted for {card_name(asked.gpu)}"
                    + (", another card than that of publ." if other else ""))
    if ladder.published_on:
        said.append(f"published (publ.) on {ladder.published_on}")
    if asked.overrides:
        said.append(f"every rung with {' '.join(asked.overrides)}"
                    + ("; what was published is without" if ladder.published_on else ""))
    said += ladder.notes
    others = sorted({row.machine.device for row in climb.rows.measured} - {machine.device})
    if others:
        said.append(f"the results also hold rows of {', '.join(others)}, which are left out here")
    return said


def smaller(ladder: Ladder, scale: Scale) -> str:
    """What a scale replaces, such as `4 layers` and shorter sequences, as `key=value` words."""
    words = []
    for name, value in ladder.shrunk.get(scale, {}).items():
        words += [f"{key}={v}" for key, v in value.items()] if isinstance(value, dict) else [f"{name}={value}"]
    return ", ".join(words)

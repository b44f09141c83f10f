"""The figures at the top of a report, and the line that the command prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from tightfit.bundled import BUNDLED
from tightfit.devices import Device
from tightfit.errors import TightfitError
from tightfit.planning.standard_tools import COMPUTES_IN, standard_tools
from tightfit.profiles import PHASES, Profile
from tightfit.recipe import Recipe
from tightfit.reporting.report.wording import percent, relative, seconds_text, size
from tightfit.tasks import TASKS
from tightfit.trace import Phase

PASSES = (Phase.FORWARD, Phase.BACKWARD)


def title(profile: Profile) -> str:
    return f"{profile.recipe.model} on {profile.device.name}"


def throughput(profile: Profile, seconds: float) -> tuple[float, str]:
    """Tokens, or samples where there are no tokens, a second, and which of the two."""
    if TASKS[profile.recipe.task].reads == "tokens":
        work, unit = profile.recipe.batch_size * profile.recipe.seq_len, "tokens/s"
    else:
        work, unit = profile.recipe.batch_size, "samples/s"
    return (work / seconds if seconds > 0 else 0.0), unit


def model_flops_utilization(profile: Profile, seconds: float) -> tuple[float | None, str]:
    """MFU and where its FLOPs come from: a bundled model's shape, counted as plans count it, or else the ops of the
    trace, recomputation left out. Nothing is downloaded, and no code of a model's is run. None where the device's peak
    or the FLOPs are not known."""
    recipe, device = profile.recipe, profile.device
    precision = recipe.precision
    if precision == "auto" or seconds <= 0:
        return None, ""
    if recipe.model in BUNDLED:
        try:
            share = standard_tools(_never).mfu(recipe, device, seconds)
        except (TightfitError, ValueError, TypeError):
            share = 0.0
        if share:
            return share, "from the model's shape"
    peak = device.peak(COMPUTES_IN.get(precision.name, "float32"), bool(getattr(precision, "tf32", False)))
    trace = profile.predicted or profile.measured
    if not peak or trace is None:
        return None, "the device's peak is not known"
    flops = sum(times * op.flops for op, times in trace.step_ops() if op.phase in PASSES)
    return (flops / seconds / peak, f"from the ops of the {trace.origin} step") if flops else (None, "no FLOPs known")


def _never(recipe: Recipe, device: Device) -> NoReturn:
    raise AssertionError("a report predicts nothing")


def predicted_step(profile: Profile) -> float:
    """Seconds of the predicted step; 0 without one."""
    return sum(profile.predicted_seconds.values())


def figures(profile: Profile) -> Iterator[tuple[str, str, str]]:
    """The headline's figures: what it is, the figure, and what stands beside it."""
    step, guess = profile.step_seconds, predicted_step(profile)
    rate, unit = throughput(profile, step)
    yield unit, f"{rate:,.0f}" if rate else "-", _guess(f"{throughput(profile, guess)[0]:,.0f}", guess)
    yield "step", seconds_text(step) if step else "-", _guess(f"{seconds_text(guess)}, {relative(step, guess)}", guess)
    used, source = model_flops_utilization(profile, step)
    yield "MFU", "-" if used is None else percent(used), source
    peak, room = profile.peak_bytes, profile.capacity_bytes
    share = f"{percent(peak / room)} of {size(room)}" if room else "capacity not known"
    yield "peak memory", size(peak) if peak else "-", (share if peak else "not measured") + _beside(profile)


def _beside(profile: Profile) -> str:
    if not profile.predicted_peak_bytes:
        return ""
    off = f", {relative(profile.peak_bytes, profile.predicted_peak_bytes)}" if profile.peak_bytes else ""
    return f"; predicted {size(profile.predicted_peak_bytes)}{off}"


def _guess(words: str, seconds: float) -> str:
    return f"predicted {words}" if seconds else "not predicted"


def phases(profile: Profile) -> list[tuple[Phase, float, float | None]]:
    """Each phase with its measured and its predicted seconds; recomputation belongs to the backward pass."""
    guess = dict(profile.predicted_seconds)
    if Phase.RECOMPUTE in guess:
        guess[Phase.BACKWARD] = guess.get(Phase.BACKWARD, 0.0) + guess.pop(Phase.RECOMPUTE)
    return [(phase, profile.phase_seconds.get(phase, 0.0), guess.get(phase) if guess else None) for phase in PHASES]


def headline(profile: Profile) -> str:
    """The figures in one line."""
    said = [f"{name} {figure}" for name, figure, _ in figures(profile) if figure != "-"]
    return ": ".join(filter(None, [title(profile), ", ".join(said)]))

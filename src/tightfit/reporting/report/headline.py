"""The figures at the top of a report, and the line that the command prints."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.bundled import BUNDLED
from tightfit.errors import TightfitError
from tightfit.planning.standard_tools import model_flops, model_flops_utilization
from tightfit.profiles import Profile
from tightfit.reporting.report.wording import percent, relative, seconds_text, size
from tightfit.tasks import TASKS
from tightfit.trace import PHASES, Phase


def title(profile: Profile) -> str:
    return f"{profile.recipe.model} on {profile.device.name}"


def throughput(profile: Profile, seconds: float) -> tuple[float, str]:
    """Tokens, or samples where there are no tokens, a second, and which of the two."""
    if TASKS[profile.recipe.task].reads == "tokens":
        work, unit = profile.recipe.batch_size * profile.recipe.seq_len, "tokens/s"
    else:
        work, unit = profile.recipe.batch_size, "samples/s"
    return (work / seconds if seconds > 0 else 0.0), unit


def utilization(profile: Profile, seconds: float) -> tuple[float | None, str]:
    """MFU of a step that takes so many seconds, and where its FLOPs come from. None where the device's peak or the
    FLOPs are not known."""
    if profile.recipe.precision == "auto" or seconds <= 0:
        return None, ""
    flops, source = step_flops(profile)
    if not flops:
        return None, "no FLOPs known"
    share = model_flops_utilization(flops, profile.recipe, profile.device, seconds)
    return (share, source) if share else (None, "the device's peak is not known")


def step_flops(profile: Profile) -> tuple[int, str]:
    """Model FLOPs of a step and where they come from: a bundled model's shape, or else the ops of the trace,
    recomputation left out. Nothing is downloaded, and no code of a model's is run. 0 where neither is there."""
    if profile.recipe.model in BUNDLED:
        try:
            flops = model_flops(profile.recipe)
        except (TightfitError, ValueError, TypeError):
            flops = 0
        if flops:
            return flops, "from the model's shape"
    trace = profile.predicted or profile.measured
    if trace is None:
        return 0, ""
    passes = (Phase.FORWARD, Phase.BACKWARD)
    return (sum(times * op.flops for op, times in trace.step_ops() if op.phase in passes),
            f"from the ops of the {trace.origin} step")


def predicted_step(profile: Profile) -> float:
    """Seconds of the predicted step; 0 without one."""
    return sum(profile.predicted_seconds.values())


def is_ahead(profile: Profile) -> bool:
    """Whether it is of a prediction alone: nothing was measured."""
    return profile.measured is None and predicted_step(profile) > 0


def own_step(profile: Profile) -> float:
    """Seconds of its step: measured, or predicted where nothing was."""
    return predicted_step(profile) if is_ahead(profile) else profile.step_seconds


def own_peak(profile: Profile) -> int:
    """Bytes at its peak, likewise."""
    return profile.predicted_peak_bytes if is_ahead(profile) else profile.peak_bytes


def uncalibrated(profile: Profile) -> str:
    """What predicted seconds are followed by that do not come from this machine's own ceilings."""
    return "" if profile.calibrated else ", not calibrated"


def figures(profile: Profile) -> Iterator[tuple[str, str, str]]:
    """The headline's figures: what it is, the figure, and what stands beside it."""
    guess, alone, step = predicted_step(profile), is_ahead(profile), own_step(profile)
    rate, unit = throughput(profile, step)
    if alone:
        beside = [f"predicted{uncalibrated(profile)}, not measured"] * 2
    else:
        guesses = (f"{throughput(profile, guess)[0]:,.0f}", f"{seconds_text(guess)}, {relative(step, guess)}")
        beside = [f"predicted {words}{uncalibrated(profile)}" if guess else "not predicted" for words in guesses]
    yield unit, f"{rate:,.0f}" if rate else "-", beside[0]
    yield "step", seconds_text(step) if step else "-", beside[1]
    used, source = utilization(profile, step)
    yield "MFU", "-" if used is None else percent(used), source
    peak, room = own_peak(profile), profile.capacity_bytes
    share = f"{percent(peak / room)} of {size(room)}" if room else "capacity not known"
    yield ("peak memory", size(peak) if peak else "-",
           (share if peak else "not measured") + ("; predicted, not measured" if alone else _beside(profile)))


def _beside(profile: Profile) -> str:
    if not profile.predicted_peak_bytes:
        return ""
    off = f", {relative(profile.peak_bytes, profile.predicted_peak_bytes)}" if profile.peak_bytes else ""
    return f"; predicted {size(profile.predicted_peak_bytes)}{off}"


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

"""The figures at the top of a report, and the line that the command prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tightfit import text
from tightfit.bundled import BUNDLED
from tightfit.errors import TightfitError
from tightfit.planning.standard_tools import model_flops, model_flops_utilization
from tightfit.profiling.profile import Profile
from tightfit.tasks import TASKS
from tightfit.trace import Phase


def title(profile: Profile) -> str:
    return f"{profile.recipe.model} on {profile.device.name}"


def throughput(profile: Profile, seconds: float) -> tuple[float, str]:
    """Tokens, or samples where there are no tokens, a second, and which of the two."""
    recipe = profile.recipe
    tokens = TASKS[recipe.task].reads == "tokens"
    work = recipe.batch_size * recipe.seq_len if tokens else recipe.batch_size
    return (work / seconds if seconds > 0 else 0.0), "tokens/s" if tokens else "samples/s"


def utilization(profile: Profile, seconds: float) -> tuple[float | None, str]:
    """MFU of a step that takes so many seconds, and where its FLOPs come from. None where the device's peak or the
    FLOPs are not known."""
    if seconds <= 0:
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
            if flops := model_flops(profile.recipe):
                return flops, "from the model's shape"
        except (TightfitError, ValueError, TypeError):
            pass
    trace = profile.predicted or profile.measured
    if trace is None:
        return 0, ""
    passes = (Phase.FORWARD, Phase.BACKWARD)
    return (sum(times * op.flops for op, times in trace.step_ops() if op.phase in passes),
            f"from the ops of the {trace.origin} step")


def uncalibrated(profile: Profile) -> str:
    """The remark on predicted seconds that do not come from measurements of this machine."""
    return "" if profile.calibrated else ", not calibrated"


class Figure(NamedTuple):
    """A figure of the headline: its name, value, text, and a remark. value: None where it is not known."""

    name: str
    value: float | None
    text: str
    remark: str


def figures(profile: Profile) -> Iterator[Figure]:
    """The headline's figures."""
    guess, alone, step = profile.predicted_step_seconds, profile.only_predicted, profile.seconds
    rate, unit = throughput(profile, step)
    predicted = f"{throughput(profile, guess)[0]:,.0f}", f"{text.seconds(guess)}, {text.relative(step, guess)}"
    remarks = [f"predicted{uncalibrated(profile)}, not measured"] * 2 if alone else [
        f"predicted {figure}{uncalibrated(profile)}" if guess else "not predicted" for figure in predicted]
    yield Figure(unit, rate or None, f"{rate:,.0f}" if rate else "-", remarks[0])
    yield Figure("step", step or None, text.seconds(step or None), remarks[1])
    mfu, source = utilization(profile, step)
    yield Figure("MFU", mfu, "-" if mfu is None else text.percent(mfu), source)
    peak, room = profile.peak, profile.capacity_bytes
    share = f"{text.percent(peak / room)} of {text.size(room)}" if room else "capacity not known"
    yield Figure("peak memory", peak or None, text.size(peak) if peak else "-", (
        share if peak else "not measured") + ("; predicted, not measured" if alone else _predicted_peak(profile)))


def _predicted_peak(profile: Profile) -> str:
    if not profile.predicted_peak_bytes:
        return ""
    off = f", {text.relative(profile.peak_bytes, profile.predicted_peak_bytes)}" if profile.peak_bytes else ""
    return f"; predicted {text.size(profile.predicted_peak_bytes)}{off}"


def headline(profile: Profile) -> str:
    """The figures in one line."""
    shown = [f"{figure.name} {figure.text}" for figure in figures(profile) if figure.value is not None]
    return ": ".join(filter(None, [title(profile), ", ".join(shown)]))

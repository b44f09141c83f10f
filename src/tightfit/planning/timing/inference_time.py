"""How long inference takes, read off its trace: the prefill, and how many tokens a second decoding gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tightfit.devices import Device
from tightfit.planning.timing.step_time import StepTime
from tightfit.recipe import Recipe
from tightfit.trace import Span, Trace

PREFILL, DECODE = "prefill", "decode"
"""The spans of a trace of inference."""


@dataclass(frozen=True, kw_only=True)
class InferenceTime:
    """Predicted time of generating from one batch of prompts, tokenizing and copying them not counted.

    prefill_seconds: the pass over the prompts, which gives every first token; all there is where nothing is generated.
    decode_seconds: all further passes together.
    tokens_per_second: tokens of all sequences that decoding gives a second, one for each sequence however many its
        beams; 0 where there is no decoding.
    samples_per_second: prompts a second, from prefill to the last token.
    calibrated: by measurements of the machine at hand.
    """

    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    samples_per_second: float
    calibrated: bool = False
    notes: tuple[str, ...] = ()


def inference_time(
    trace: Trace, recipe: Recipe, device: Device, timed: Callable[[Trace, Recipe, Device], StepTime]
) -> InferenceTime:
    """The time of a trace of inference. timed: what a trace's last step takes, such as `timing.step_time`."""
    prefill, decode = (timed(stage(trace, name), recipe, device) for name in (PREFILL, DECODE))
    first, rest = prefill.seconds - prefill.data, decode.seconds - decode.data  # a training global batch's data
    tokens = recipe.batch_size * sum(span.times for span in trace.spans if span.name == DECODE)
    return InferenceTime(
        prefill_seconds=first,
        decode_seconds=rest,
        tokens_per_second=tokens / rest if rest > 0 else 0.0,
        samples_per_second=recipe.batch_size / (first + rest) if first + rest > 0 else 0.0,
        calibrated=prefill.calibrated,
        notes=tuple(dict.fromkeys([*prefill.notes, *decode.notes])),
    )


def stage(trace: Trace, name: str) -> Trace:
    """The trace with only those spans of it, `prefill` or `decode`, as its one step; none of its ops where it has no
    such span."""
    spans = [span for span in trace.spans if span.name == name]
    inside = [replace(span, step=1) for span in spans]
    whole = [Span(name="step 1", start=spans[0].start, stop=spans[-1].stop, step=1)] if spans else []
    ops = [op for op in trace.ops if any(span.start <= op.tick < span.stop for span in spans)]
    return replace(trace, ops=ops, spans=[*whole, *inside])

"""From a recipe with `mode: inference` to a plan: number format and attention; batch, prompt and tokens stay as asked.

| field | tried | why not the rest |
|---|---|---|
| precision | 16-bit weights (bf16 from compute capability 8.0, fp16 below), autocast to the same format, fp32 (tf32 from 8.0); on the CPU fp32 first | bf16-pure is 16-bit weights with a rounding of updates, of which there are none |
| attention | sdpa, then eager | transformers generates with these |

Every combination is traced itself. The fastest that fits with the margin to spare is chosen, by the time from the
prompts to the last token; another precision than the first one has to be worth it, and counts as HANDICAP slower.
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import Margin, Tools, fit, join
from tightfit.planning.plan import Answers, Candidate, Change, Estimate, Plan, Time
from tightfit.planning.search.answers import (
    GPUS_TRACED,
    SHOWN,
    SHOWN_TOO_LARGE,
    beside,
    faster_by,
    misses,
    still_known,
    written,
)
from tightfit.planning.search.budget import Budget, Progress
from tightfit.planning.search.exploring import HANDICAP
from tightfit.planning.timing.inference_time import InferenceTime, inference_time
from tightfit.planning.wording import size
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.techniques import Attention, Precision, Technique
from tightfit.techniques.attention import Eager, Sdpa
from tightfit.techniques.compile import NoCompile
from tightfit.techniques.precision import Bf16, Fp16, Fp32, half_precision

TRAINING_ALONE = ("micro_batch_size", "checkpointing", "optimizer")
"""Fields that a search decides for training and that generating has no use for."""
BATCHES_TRACED = 8
"""How many smaller batches are traced for until one is found that fits."""


@dataclass
class _Search:
    """A search under way."""

    asked: Recipe
    device: Device
    tools: Tools
    margin: Margin
    budget: Budget

    def costed(self, recipe: Recipe, device: Device, text: str) -> Estimate:
        """What a resolved recipe costs, from a trace of its own. text: what is told of it. Raises Refused or
        ModelError."""
        self.budget.spend(text)
        trace = self.tools.predict(recipe, device)
        timed = inference_time(trace, recipe, device, self.tools.step_time)
        found = fit(trace, device, self.tools, self.margin)
        return join(trace, found, _time(recipe, timed), timed.notes)


def search_inference(
    recipe: Recipe, device: Device, tools: Tools, *, margin: Margin | None = None, catalogue: Sequence[Device] = (),
    progress: Progress | None = None,
) -> Plan:  # fmt: skip
    """The plan of generating, or of one forward pass for a model that generates nothing; see `search` for arguments.

    Raises Refused where nothing can be built, ModelError for a model that cannot be traced.
    """
    choices = list(_choices(recipe, device))
    budget = Budget(limit=len(choices) + BATCHES_TRACED + GPUS_TRACED, progress=progress)
    search = _Search(recipe, device, tools, margin or Margin(), budget)
    found: list[Candidate] = []
    reasons: list[str] = []
    failure: ModelError | None = None
    for choice in choices:
        try:
            found.append(Candidate(recipe=choice, estimate=search.costed(choice, device, _named(choice))))
        except Refused as error:
            reasons.append(str(error))
        except ModelError as error:
            reasons.append(str(error))
            failure = failure or error
    if not found and failure is not None:
        raise ModelError(f"{failure}{still_known(recipe)}") from failure
    if not found:
        told = "; ".join(dict.fromkeys(reasons))
        raise Refused(told or f"no number format and attention serve this recipe on {device.name}")
    return _plan(search, found, list(dict.fromkeys(reasons)), catalogue, tried=len(choices))


def _choices(recipe: Recipe, device: Device) -> Iterator[Recipe]:
    """Resolved recipes, the most usual first."""
    usual = {"checkpointing": "auto", "optimizer": "auto", "compile": "auto"}
    for attention in _attentions(recipe):
        for precision in _precisions(recipe, device):
            plain = resolve(recipe.model_copy(update=usual), device)
            chosen = plain.model_copy(update={
                "precision": precision, "attention": attention, "micro_batch_size": recipe.batch_size,
                "compile": NoCompile() if recipe.compile == "auto" else recipe.compile,
            })  # fmt: skip
            if not chosen.refusals(device) or (recipe.precision != "auto" and recipe.attention != "auto"):
                yield chosen


def _attentions(recipe: Recipe) -> Sequence[Attention]:
    return [recipe.attention] if recipe.attention != "auto" else [Sdpa(), Eager()]


def _precisions(recipe: Recipe, device: Device) -> Sequence[Precision]:
    if recipe.precision != "auto":
        return [recipe.precision]
    full, half = Fp32(tf32=device.at_least(8)), half_precision(device)
    halves = [half(full_eval=True), half()]
    return [full, *halves] if device.kind == "cpu" else [*halves, full]


def _time(recipe: Recipe, timed: InferenceTime) -> Time:
    """A batch's time; its tokens are the generated ones, or those read where nothing is generated."""
    whole = timed.prefill_seconds + timed.decode_seconds
    tokens = recipe.inference.new_tokens
    if not TASKS[recipe.task].generates:
        tokens = recipe.seq_len if TASKS[recipe.task].reads == "tokens" else 0
    return Time(
        step_seconds=whole, samples_per_second=timed.samples_per_second,
        tokens_per_second=timed.samples_per_second * tokens, mfu=0.0, calibrated=timed.calibrated,
        prefill_seconds=timed.prefill_seconds,
    )  # fmt: skip


def _tier(candidate: Candidate) -> int:
    """0 with the margin to spare, 1 without, 2 where it does not fit."""
    return 0 if candidate.estimate.safe else 2 if candidate.estimate.fits == "no" else 1


def _plan(
    search: _Search, found: Sequence[Candidate], reasons: Sequence[str], catalogue: Sequence[Device], tried: int
) -> Plan:
    device = search.device
    usual = _precisions(search.asked, device)[0]

    def cost(candidate: Candidate) -> tuple[int, int, float]:
        docked = 1 + HANDICAP * (candidate.recipe.precision != usual)
        return _tier(candidate), candidate.estimate.missing, docked * candidate.estimate.time.step_seconds

    ranked = sorted(found, key=cost)
    fitting = [c for c in ranked if _tier(c) < 2][:SHOWN]
    large = [c for c in ranked if _tier(c) == 2][: SHOWN_TOO_LARGE if fitting else SHOWN]
    best = fitting[0] if fitting else None
    why = _why(best, device) if best is not None else ""
    missed = tuple(misses(_named(c.recipe), c.estimate.memory) for c in large)
    change, change_text = _smaller_batch(search, large[0]) if best is None else (None, "")
    gpu, gpu_text = _smallest_gpu(search, found, catalogue)
    answers = Answers(
        why=why,
        next_best=_compared(fitting[1], fitting[0]) if len(fitting) > 1 else "",
        would_not_fit=missed,
        smallest_change=change,
        smallest_change_text=change_text,
        smallest_gpu=gpu,
        smallest_gpu_text=gpu_text,
    )
    candidates = [_with(c, [_compared(c, best)] if best not in (None, c) else []) for c in fitting]
    candidates += [_with(c, [sentence]) for c, sentence in zip(large, missed, strict=True)]
    unread = _unread(search.asked)
    told = (why, answers.next_best, change_text, gpu_text, *unread)
    candidates[0] = _with(candidates[0], [text for text in told if text])
    search.budget.done()
    return Plan(
        device=device, asked=search.asked, candidates=tuple(candidates),
        chosen=candidates[0] if best is not None else None, answers=answers,
        notes=(*unread, *(f"left out: {reason}" for reason in reasons)), tried=tried,
        predictions=search.budget.made,
    )  # fmt: skip


def _unread(recipe: Recipe) -> tuple[str, ...]:
    """What is to be said of pins that only training reads."""
    pinned = [written(value) if isinstance(value, Technique) else f"{field}={value}" for field in TRAINING_ALONE
              if (value := getattr(recipe, field)) != "auto"]
    return (f"{', '.join(pinned)}: for training alone, and not read with mode=inference.",) if pinned else ()


def _with(candidate: Candidate, reasons: Sequence[str]) -> Candidate:
    return replace(candidate, reasons=(*candidate.reasons, *reasons))


def _named(recipe: Recipe) -> str:
    assert recipe.precision != "auto"
    assert recipe.attention != "auto"
    return f"{written(recipe.precision)} {written(recipe.attention)}"


def _why(best: Candidate, device: Device) -> str:
    used, needs, time = best.estimate.memory.used, best.estimate.memory, best.estimate.time
    inputs = "prompts" if TASKS[best.recipe.task].generates else "samples"
    seconds = f"{time.step_seconds:.3g} s for {best.recipe.batch_size:,} {inputs}"
    if time.prefill_seconds < time.step_seconds:
        seconds += f", {time.prefill_seconds:.3g} s of it until the first token"
    text = (f"The fastest that fits: {seconds}, with {size(used)} of {size(device.memory_bytes)} in use at the peak, "
            f"in the {needs.peak_in}; {size(needs.margin)} were to stay free.")
    return text if best.estimate.safe else f"{text} It leaves less than that free: nothing found leaves more."


def _compared(other: Candidate, best: Candidate) -> str:
    faster = faster_by(other.estimate.time.samples_per_second, best.estimate.time.samples_per_second)
    memory = other.estimate.memory.peak_reserved - best.estimate.memory.peak_reserved
    remark = "; it leaves less than the margin free" if _tier(other) == 1 else ""
    return f"{_named(other.recipe)}: {beside(faster, memory)}{remark}."


def _smaller_batch(search: _Search, nearest: Candidate) -> tuple[Change | None, str]:
    """The largest batch, halving, with which the nearest combination fits, and that as a sentence; None where not even
    a batch of one does."""
    batch = nearest.recipe.batch_size
    for _ in range(BATCHES_TRACED):
        if batch == 1:
            break
        batch //= 2
        changed = nearest.recipe.model_copy(update={"batch_size": batch, "micro_batch_size": batch})
        try:
            estimate = search.costed(changed, search.device, f"batch_size={batch}")
        except (Refused, ModelError):
            return None, ""
        if estimate.safe:
            change = Change(text=f"batch_size={batch}", why="fewer at once", estimate=estimate)
            return change, f"The smallest that makes it fit: {change.text} ({change.why})."
    return None, f"No smaller batch would make it fit, not even batch_size={batch}."


def _smallest_gpu(
    search: _Search, found: Sequence[Candidate], catalogue: Sequence[Device]
) -> tuple[Device | None, str]:
    """The smallest GPU of the catalogue that would do, and that as a sentence; traced for that GPU itself."""
    device = search.device
    if device.kind != "cuda" or not catalogue:
        return None, ""
    least = min(found, key=lambda c: c.estimate.memory.used)
    fits, traced = _tier(least) < 2, 0
    for gpu in sorted(catalogue, key=lambda d: (d.memory_bytes, d.name)):
        if fits and gpu.memory_bytes >= device.memory_bytes:
            return device, f"No smaller GPU of the catalogue than {device.name} would do."
        if least.estimate.memory.used + search.margin.of(gpu) > gpu.memory_bytes:
            continue
        there = _as_on(search.asked, least.recipe, gpu)
        if there.refusals(gpu):
            continue
        if traced == GPUS_TRACED:
            return None, ""
        traced += 1
        try:
            estimate = search.costed(there, gpu, f"whether {gpu.name} would do")
        except (Refused, ModelError):
            continue
        if estimate.safe:
            return gpu, (f"The smallest GPU that would do is {gpu.name} ({size(gpu.memory_bytes)}): "
                         f"{size(estimate.memory.used)} in use with {_named(there)}.")
    return (device if fits else None), f"No {'smaller ' * fits}GPU of the catalogue would do."


def _as_on(asked: Recipe, recipe: Recipe, gpu: Device) -> Recipe:
    """The recipe in the half precision that the GPU computes in, where the asked one leaves it open."""
    half = recipe.precision
    if asked.precision == "auto" and isinstance(half, (Bf16, Fp16)):
        return recipe.model_copy(update={"precision": half_precision(gpu)(full_eval=half.full_eval)})
    return recipe

"""From a recipe to a plan: explore, choose, and answer what a person asks next."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.garbage import gc_paused
from tightfit.models import model_facts
from tightfit.planning.alignment import Misalignment, dimensions, misaligned
from tightfit.planning.defaults import settle_rest
from tightfit.planning.estimate import Margin, Tools
from tightfit.planning.plan import Answers, Candidate, Plan
from tightfit.planning.search.answers import (
    SHOWN,
    SHOWN_TOO_LARGE,
    candidate,
    compared,
    misses,
    named,
    nearest_in_half,
    ranked,
    still_known,
    too_large,
    why,
)
from tightfit.planning.search.budget import Budget, Progress, Spent
from tightfit.planning.search.candidates import (
    attentions,
    check_pins,
    eager_may_be_faster,
    micro_batch_sizes,
    numerics,
)
from tightfit.planning.search.compiled_search import search_compiled
from tightfit.planning.search.exploring import Exploration
from tightfit.planning.search.found import Found
from tightfit.planning.search.inference_search import search_inference
from tightfit.planning.search.probing import Prober
from tightfit.planning.search.remedies import offload, probe_thriftiest, smallest_change, smallest_gpu
from tightfit.recipe import Recipe
from tightfit.system import host_memory
from tightfit.tasks import TASKS
from tightfit.techniques.attention import Eager
from tightfit.techniques.loss import Plain

"""Backends whose predictions are compilations of whole steps: too few for this search, and none made from another."""
TRACES = 30
"""Traces that a search makes at most."""
KEPT_BACK = 6
"""Of these, how many are kept for verifying the choice and for the answers."""
EVENTS = 400_000
"""Ops and allocations in all the traces of an exploration, from which on no more are made: of a model of billions of
weights few traces hold so many."""
COMPARED = 3
"""How many combinations that fit are costed at least, where there are so many."""
FEW = 12
"""Traces up to which more are made for no more than something to compare the choice with."""


@gc_paused()
def search(
    recipe: Recipe,
    device: Device,
    tools: Tools,
    *,
    margin: Margin | None = None,
    catalogue: Sequence[Device] = (),
    host_bytes: int | None = None,
    limit: int = TRACES,
    progress: Progress | None = None,
    choice_alone: bool = False,
) -> Plan:
    """The plan of a recipe on a device.

    tools: see `standard_tools`. margin: what is to stay free. catalogue: GPUs among which the smallest that would do is
    named; none are asked about where it is empty. host_bytes: of the machine around the device, for offloading; by
    default this machine's. limit: traces at most. progress: told of each trace. choice_alone: make
    no trace that only an answer beside the choice needs.

    Raises Refused for pins that contradict each other, naming them, and where nothing can be built; ModelError for a
    model that cannot be traced, with what can be said all the same.
    """
    check_length(recipe)
    if recipe.backend.compiles_whole_steps:
        return search_compiled(recipe, device, tools, margin=margin, progress=progress, choice_alone=choice_alone)
    if recipe.mode == "inference":
        return search_inference(recipe, device, tools, margin=margin, catalogue=catalogue, progress=progress)
    check_pins(recipe, device)
    settled = settle_rest(recipe, device)
    budget = Budget(limit=limit, kept_back=KEPT_BACK, events=EVENTS, progress=progress)
    exploration = _explored(recipe, settled, device, tools, margin or Margin(), budget)
    prober = exploration.prober
    budget.release()
    exploration.verify()
    if exploration.best() is None:
        exploration.resort()
        exploration.verify()
    if not choice_alone and budget.made < FEW:
        exploration.fill(COMPARED)
        exploration.verify()
    best, shown = exploration.best(), ranked(exploration)
    if best is None:
        probe_thriftiest(exploration)
    candidates: list[Candidate] = []
    half = None if best is None or choice_alone else nearest_in_half(exploration, best)
    sentences = why(exploration, best, device, half) if best is not None else []
    for found in shown[:SHOWN]:
        assert best is not None
        candidates.append(candidate(exploration, found, sentences if found is best else [compared(found, best)]))
    large = too_large(exploration, half)[:SHOWN_TOO_LARGE if best is not None else SHOWN]
    missed = [_misses(found, best or large[0]) for found in large]
    candidates += [candidate(exploration, found, [sentence]) for found, sentence in zip(large, missed, strict=True)]
    answers = (Answers(why=" ".join(sentences)) if choice_alone
               else _answers(exploration, best, shown, missed, sentences, catalogue, host_bytes))
    if best is not None:  # one object says all: the chosen candidate carries the answers too
        told = [*sentences, answers.next_best, answers.smallest_gpu_text, *(m.sentence for m in answers.misaligned)]
        candidates[0] = candidate(exploration, best, [sentence for sentence in told if sentence])
    elif candidates:
        offloading = () if answers.offload is None else answers.offload.sentences
        told = [missed[0], answers.smallest_change_text, answers.smallest_gpu_text, *offloading]
        candidates[0] = candidate(exploration, large[0], [sentence for sentence in told if sentence])
    budget.done()
    return Plan(
        device=device,
        asked=recipe,
        candidates=tuple(candidates),
        chosen=candidates[0] if best is not None else None,
        answers=answers,
        notes=(*exploration.notes, *_refused(prober)),
        tried=len(exploration.weighed) * len(prober.sizes),
        predictions=budget.made,
    )


def check_length(recipe: Recipe) -> None:
    """Raise Refused where a sequence is longer than the model has positions, as training would."""
    if TASKS[recipe.task].reads != "tokens":
        return
    try:
        limit = model_facts(recipe).max_positions
    except ModelError:  # a model of the caller's own, or one whose configuration says nothing: tracing tells
        return
    if limit is not None and recipe.seq_len > limit:
        raise Refused(f"seq_len: {recipe.seq_len} exceeds the model's {limit} positions; write seq_len={limit}")


def _explored(
    recipe: Recipe, settled: Recipe, device: Device, tools: Tools, margin: Margin, budget: Budget
) -> Exploration:
    """The search's result, with the first attention that can be built; and eager's, where it may be faster."""
    failure: ModelError | None = None
    refused: list[str] = []
    for attention in attentions(recipe, device):
        prober = Prober(settled, device, tools, margin, micro_batch_sizes(recipe), budget)
        exploration = Exploration(recipe, device, prober)
        exploration.run(attention)
        sample = prober.sample()
        if sample is not None:
            best = exploration.best()  # where sdpa does not fit without a change of numerics, eager does not either
            fits = best is not None and (recipe.allow_numerics or not numerics(recipe, best.config))
            if fits and eager_may_be_faster(recipe, device, attention, sample[1]):
                exploration.run(Eager())
            return exploration
        failure = failure or prober.failure
        refused += prober.refused.values()
    if recipe.loss == "auto" and any(reason.startswith("loss:") for reason in (str(failure), *refused)):
        plain = {"loss": Plain()}  # the model's head cannot have another
        recipe, settled = recipe.model_copy(update=plain), settled.model_copy(update=plain)
        return _explored(recipe, settled, device, tools, margin, budget)
    if failure is not None:
        raise ModelError(f"{failure}{still_known(recipe)}") from failure
    reasons = list(dict.fromkeys(refused))
    raise Refused("; ".join(reasons[:3]) or f"no combination of techniques serves this recipe on {device.name}")


def _answers(
    exploration: Exploration, best: Found | None, shown: Sequence[Found], missed: Sequence[str],
    sentences: Sequence[str], catalogue: Sequence[Device], host_bytes: int | None,
) -> Answers:
    host = host_memory().total if host_bytes is None else host_bytes
    change, change_text = smallest_change(exploration) if best is None else (None, "")
    gpu, gpu_text = smallest_gpu(exploration, catalogue)
    return Answers(
        why=" ".join(sentences),
        next_best=compared(shown[1], best) if best is not None and len(shown) > 1 else "",
        would_not_fit=tuple(missed),
        smallest_change=change,
        smallest_change_text=change_text,
        smallest_gpu=gpu,
        smallest_gpu_text=gpu_text,
        offload=offload(exploration, host) if best is None else None,
        misaligned=_misaligned(exploration, best) if best is not None else (),
    )


def _misaligned(exploration: Exploration, best: Found) -> tuple[Misalignment, ...]:
    """The chosen recipe's awkward dimensions, with the gain from padding by a trace of the padded recipe."""
    prober = exploration.prober
    chosen = best.config.on(prober.recipe, best.micro)

    def gain(padded: Recipe) -> float | None:
        try:
            trace = prober.predict(padded, text="with padded dimensions")
        except (Spent, Refused, ModelError):
            return None
        seconds = prober.tools.step_time(trace, padded, exploration.device).seconds
        return 1 - seconds / best.estimate.time.step_seconds

    try:
        dims = dimensions(chosen)
    except ModelError:  # a model of the caller's own
        return ()
    return misaligned(chosen, exploration.device, dims, gain)


def _misses(found: Found, first: Found) -> str:
    """By how much a combination does not fit, named by what tells it from the plan's first one."""
    name = named(found.config, found.micro, None if found is first else (first.config, first.micro))
    return misses(name, found.estimate.memory)


def _refused(prober: Prober) -> list[str]:
    """What could not be built, each reason once."""
    return [f"left out: {reason}" for reason in dict.fromkeys(prober.refused.values())]

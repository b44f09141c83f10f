"""The plan: what a recipe would cost on a device in each of its variants, which variant to take, and why.

`Plan.to_json` is the object that `tightfit plan --json` prints and that a run's `plan.json` holds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tightfit.backends.measurements import ModelSize
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.planning.alignment import Misalignment
from tightfit.planning.costs import Estimate
from tightfit.planning.whole_run import WholeRun, steps_of
from tightfit.recipe import CHOICES, CHOSEN_SLOTS, Recipe
from tightfit.techniques import SLOTS
from tightfit.text import size


def choices_of(recipe: Recipe) -> tuple[str, ...]:
    """The recipe fields that a search decides for it, and those that say what is trained, and where, where a resolved
    recipe does not train the whole model on one GPU."""
    if recipe.backend.compiles_whole_steps:
        name = recipe.backend.name  # a slot of which it considers one variant alone leaves nothing to decide
        return (*(field for field in CHOICES if sum(name in v.auto_on for v in SLOTS.get(field, ())) != 1), "backend")
    if recipe.mode == "train":
        streams, freezes = recipe.offloaded.needs_by_block, recipe.trainable.freezes
        used = {"offload": recipe.offloaded.uses_host, "accumulation": streams, "update": streams,
                "parallel": recipe.parallel.process_count > 1, "trainable": freezes, "base": freezes}
        return (*CHOICES, *(field for field, is_used in used.items() if is_used))
    return tuple(slot for slot in CHOSEN_SLOTS if not SLOTS[slot][0].trains_only)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A resolved recipe and its cost.

    changes_numerics: what was picked for it that changes numerics, as `field=value`; empty where nothing was.
    reasons: sentences: what it takes where it is chosen, or what speaks against it.
    """

    recipe: Recipe
    estimate: Estimate
    changes_numerics: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def numerics_change(self) -> tuple[int, int]:
        """Change of numerics of what was picked: its harshest technique, then the sum of all; see `Technique`."""
        found = [getattr(self.recipe, change.partition("=")[0]).numerics_change for change in self.changes_numerics]
        return max(found, default=0), sum(found)

    def choices(self) -> dict[str, Any]:
        """The fields that a search decides, as plain values in the shortest form."""
        values = self.recipe.to_dict()
        return {field: values[field] for field in choices_of(self.recipe)}

    def to_json(self, rank: int) -> dict[str, Any]:
        """Plain values: bytes as integers, times in seconds."""
        time = self.estimate.time
        return {
            "rank": rank,
            "recipe": self.recipe.to_dict(),
            "fits": self.estimate.memory.verdict,
            "memory": self.estimate.memory.to_json(),
            "time": time.to_json(),
            "calibrated": time.calibrated,
            "untraced": [{name: value for name, value in asdict(figure).items() if name != "born"}
                         for figure in self.estimate.untraced],
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, kw_only=True)
class Change:
    """One field written differently, and what the recipe then costs.

    text: as a person writes it, such as `checkpointing=every-block`.
    why: in a few words.
    """

    text: str
    why: str
    estimate: Estimate


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Speed on several GPUs.

    gpus: how many. per_gpu: tokens a second of each, samples for images. efficiency: of that, over what one GPU does
        alone with its share of the global batch; None where it does not hold the model.
    bound_by: what binds a step, in a few words. text: all of it, as sentences.
    """

    gpus: int
    per_gpu: float
    efficiency: float | None
    bound_by: str
    text: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"gpus": self.gpus, "per_gpu": self.per_gpu, "efficiency": self.efficiency, "bound_by": self.bound_by}


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The most that fits with the margin free. field: what was asked about, `value` its largest value; None where not
    even the smallest does. text: as a sentence. traces: how many were made for it."""

    field: str
    value: int | str | None
    text: str
    traces: int = 0


class Label(StrEnum):
    """Label of an answer, as it stands before the sentence."""

    WHY = "why"
    SCALING = "scaling"
    NEXT_BEST = "next best"
    TOO_LARGE = "too large"
    CHANGE = "change"
    SMALLEST_GPU = "smallest GPU"
    OPEN_FIELDS = "open fields"
    MORE_GPUS = "more GPUs"
    OFFLOAD = "offload"
    ADAPTERS = "adapters"
    NOT_READ = "not read"
    DROPOUT = "dropout"
    ALIGNMENT = "alignment"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers to what a person asks of a plan, as sentences; empty where there is nothing to say.

    why: why the chosen candidate is.
    next_best: what the next best would cost.
    would_not_fit: what would not fit, and by how much.
    smallest_change: the least change of one field with which the recipe as written fits; None where it fits, or where
        no single change helps.
    smallest_change_text: the same as a sentence, or that there is none; empty where it fits.
    smallest_gpu: the smallest device of the catalogue on which the recipe as written fits; None where none is known.
    smallest_gpu_text: the same as a sentence.
    smallest_gpu_changed_text: the same of the choice, where it changes numerics; else empty.
    open_fields: the gain of leaving pinned fields open. dropout: that of training without it inside attention.
    scaling: speed on several GPUs; None on one.
    more_gpus: what dividing the model among GPUs takes; empty where one holds it whole.
    offload: that `offload=none` is pinned where nothing fits. adapters: what they would take there.
    unread: what was written and has no effect: pins that generating has no use for, arguments of Hugging Face.
    misaligned: dimensions that leave tensor cores idle, with the gain from padding.
    """

    why: str = ""
    next_best: str = ""
    would_not_fit: tuple[str, ...] = ()
    smallest_change: Change | None = None
    smallest_change_text: str = ""
    smallest_gpu: Device | None = None
    smallest_gpu_text: str = ""
    smallest_gpu_changed_text: str = ""
    open_fields: str = ""
    scaling: Scaling | None = None
    more_gpus: str = ""
    offload: str = ""
    adapters: str = ""
    unread: tuple[str, ...] = ()
    dropout: str = ""
    misaligned: tuple[Misalignment, ...] = ()

    def lines(self) -> list[tuple[Label, str]]:
        """Label and sentence of each, in the order in which they are read."""
        lines = [
            (Label.WHY, self.why),
            (Label.SCALING, "" if self.scaling is None else self.scaling.text),
            (Label.NEXT_BEST, self.next_best),
            *((Label.TOO_LARGE, text) for text in self.would_not_fit),
            (Label.CHANGE, self.smallest_change_text),
            (Label.SMALLEST_GPU, self.smallest_gpu_text),
            (Label.SMALLEST_GPU, self.smallest_gpu_changed_text),
            (Label.OPEN_FIELDS, self.open_fields),
            (Label.MORE_GPUS, self.more_gpus),
            (Label.OFFLOAD, self.offload),
            (Label.ADAPTERS, self.adapters),
            *((Label.NOT_READ, text) for text in self.unread),
            (Label.DROPOUT, self.dropout),
            *((Label.ALIGNMENT, misaligned.sentence) for misaligned in self.misaligned),
        ]
        return [(label, text) for label, text in lines if text]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a search. found: the plan, or the comparison of GPUs, that was made by then. said: how far that
    is."""

    def __init__(self, found: Any, said: str) -> None:
        super().__init__(found, said)
        self.found, self.said = found, said


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe's candidates on a device, the best first.

    asked: the recipe as written.
    candidates: those that fit, fastest first, then informative ones that do not.
    chosen: the best; None where nothing fits.
    notes: sentences about the search as a whole: what was refused and why, what was left out.
    tried: how many combinations were considered.
    predictions: how many of them, and of their probes, were traced.
    tokens: how many a whole run learns from; 0 where nobody asked. price: of all GPUs for an hour.
    largest: what was asked to be as large as fits, and how large it is here; None where nobody asked.
    experts: size of a mixture of experts; None of any other model.
    """

    device: Device
    asked: Recipe
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    answers: Answers
    notes: tuple[str, ...] = ()
    tried: int = 0
    predictions: int = 0
    tokens: int = 0
    price: float | None = None
    largest: Largest | None = None
    experts: ModelSize | None = None

    @property
    def whole_run(self) -> WholeRun | None:
        """The length and cost of a run over `tokens`, or else of as many steps as the recipe was written with; None
        where neither is said, and where nothing fits."""
        if self.chosen is None:
            return None
        time = self.chosen.estimate.time
        tokens = self.tokens or round(steps_of(self.asked) * time.step_seconds * time.throughput)
        return WholeRun.of(self.chosen.recipe, time, tokens, self.price) if tokens else None

    @property
    def reasons(self) -> list[str]:
        """Sentences on the first candidate: its own, the answers, and notes on it and on the search."""
        first, answers = self.candidates[0], [text for label, text in self.answers.lines() if label != Label.TOO_LARGE]
        notes = (*first.estimate.notes, *first.estimate.memory.notes)
        return list(dict.fromkeys([*first.reasons, *answers, *notes, *self.notes]))

    @property
    def recipe(self) -> Recipe:
        """The chosen recipe, with no `auto` left. Raises Refused where nothing fits."""
        if self.chosen is None:
            raise Refused(self.nothing_fits())
        return self.chosen.recipe

    def nothing_fits(self) -> str:
        """One sentence for a plan without a choice: by how much the nearest misses, and what would help."""
        answers, device = self.answers, self.device
        parts = [f"nothing fits on {device.name}, which has {size(device.memory_bytes)}"]
        if self.candidates:
            parts.append(f"the nearest misses {self.candidates[0].estimate.memory.lacking}")
        if answers.smallest_change is not None:
            parts.append(f"write {answers.smallest_change.text} ({answers.smallest_change.why})")
        elif answers.smallest_change_text:
            parts.append(answers.smallest_change_text[0].lower() + answers.smallest_change_text[1:].rstrip("."))
        if answers.smallest_gpu is not None:
            parts.append(f"it fits on {answers.smallest_gpu.name}")
        return ". ".join(text for text in ("; ".join(parts), answers.offload.rstrip(".")) if text)

    def training_arguments(self) -> dict[str, Any]:
        """The chosen recipe as arguments of transformers' `TrainingArguments`; on the processor where the plan is for
        it. Warns of adapters, which are the model's. Raises Refused as `recipe` does, and for a choice that the Hugging
        Face Trainer has no argument for."""
        from tightfit.recipe.hf_arguments import training_arguments

        if self.asked.mode == "inference":
            raise Refused("mode: 'inference' has no training arguments; write mode=train")
        here = {"device": "cpu"} if self.device.kind == "cpu" else {}
        return training_arguments(self.recipe.model_copy(update=here))

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`: bytes as integers, times in seconds. Answers and what is noted of the
        whole plan stand among the first candidate's reasons."""
        candidates = [candidate.to_json(rank) for rank, candidate in enumerate(self.candidates, start=1)]
        if candidates:
            candidates[0]["reasons"] = self.reasons
        device: dict[str, Any] = {"name": self.device.name, "memory_bytes": self.device.memory_bytes}
        if self.device.host_bytes:
            device |= {"host_memory_bytes": self.device.host_bytes, "host_memory_assumed": self.device.host_assumed}
        if self.device.world > 1:
            device |= {"gpus": self.device.cards, "nodes": self.device.machines,
                       "network_bytes_per_second": self.device.network_bandwidth}
        scaling = {} if self.answers.scaling is None else {"scaling": self.answers.scaling.to_json()}
        length = {} if self.whole_run is None else {"whole_run": self.whole_run.to_json()}
        experts = {} if self.experts is None else {"model": asdict(self.experts)}
        largest = {} if self.largest is None else {"largest": {self.largest.field: self.largest.value}}
        return {"device": device, **experts, "candidates": candidates, **scaling, **length, **largest}

"""The search where a prediction is a compilation of the whole step, as with JAX: seconds each, and nothing in between.

Nothing is interpolated: what is shown was compiled. So few recipes are, several side by side, and in rounds:

| round | compiled | why |
|---|---|---|
| 1 | both layouts of the layers, each kind of attention, nothing recomputed and every block, at one micro-batch | tells the layouts and the kernels apart |
| 2 | the other kinds of checkpointing, and full precision, with the faster layout and kernel | what lies between the two ends, and what half precision gains |
| 3 | the fastest of these at the largest micro-batches that their memory leaves room for | memory grows no faster than the micro-batch |
| 4 | where one does not fit after all, the next smaller | |

Where nothing fits at the first micro-batch, round 3 goes down from it. Precision is bf16 where the GPU has it, else fp16.
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning import estimate as estimating
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import Margin, Tools
from tightfit.planning.plan import Answers, Candidate, Estimate, Plan
from tightfit.planning.search.answers import beside, faster_by, misses, written
from tightfit.planning.search.budget import Progress
from tightfit.planning.search.candidates import check_pins, micro_batch_sizes
from tightfit.planning.wording import size
from tightfit.recipe import Recipe
from tightfit.system import cores
from tightfit.techniques import Attention, Backend, Checkpointing, Precision
from tightfit.techniques.attention import Sdpa
from tightfit.techniques.checkpointing import AttentionOnly, EveryBlock, MlpOnly, NoCheckpointing, Selective
from tightfit.techniques.precision import Fp32

COMPILATIONS = 16
"""Steps that a search compiles at most."""
BETWEEN: tuple[Checkpointing, ...] = (Selective(), AttentionOnly(), MlpOnly(), EveryBlock(apart=True))
"""Kinds of checkpointing between none and every block, as the second round tries them."""
FASTEST = 3
"""How many of the fastest are tried at larger micro-batches."""
SHOWN, SHOWN_TOO_LARGE = 8, 4
"""Candidates shown that fit, and that do not."""
SIDE_BY_SIDE = 8
"""Compilations at once, at most: each takes a core and up to 2 GB."""


@dataclass(frozen=True)
class Setting:
    """What tells one compiled recipe from another."""

    backend: Backend
    checkpointing: Checkpointing
    attention: Attention
    precision: Precision
    micro: int

    def on(self, recipe: Recipe) -> Recipe:
        return recipe.model_copy(update={
            "backend": self.backend, "checkpointing": self.checkpointing, "attention": self.attention,
            "precision": self.precision, "micro_batch_size": self.micro,
        })  # fmt: skip

    def named(self, other: Setting | None = None) -> str:
        """As a person writes it; with `other`, only what differs from it."""
        parts = [] if other is not None and other.micro == self.micro else [f"micro_batch_size={self.micro}"]
        for slot in ("backend", "checkpointing", "attention", "precision"):
            mine = getattr(self, slot)
            if other is None or getattr(other, slot) != mine:
                parts.append(written(mine))
        return " ".join(parts) or "the same"


@dataclass
class Round:
    """A search under way. found: what was compiled. refused: what could not be, with the reason."""

    recipe: Recipe
    device: Device
    tools: Tools
    margin: Margin
    limit: int
    progress: Progress | None
    found: dict[Setting, Estimate] = field(default_factory=dict)
    refused: dict[Setting, str] = field(default_factory=dict)
    failure: ModelError | None = None

    def compile(self, settings: Iterable[Setting]) -> None:
        """Compile what is not known yet, as far as the limit goes, several side by side."""
        new = [s for s in dict.fromkeys(settings) if s not in self.found and s not in self.refused]
        new = new[: max(self.limit - len(self.found), 0)]
        with ThreadPoolExecutor(min(cores(), SIDE_BY_SIDE, max(len(new), 1))) as pool:
            waiting = {pool.submit(self._estimate, setting): setting for setting in new}
            self._tell(new[0].named() if new else "")
            for future in as_completed(waiting):
                setting = waiting[future]
                try:
                    self.found[setting] = future.result()
                except ModelError as error:
                    self.failure = self.failure or error
                    self.refused[setting] = str(error)
                except Refused as error:
                    self.refused[setting] = str(error)
                self._tell(setting.named())

    def _estimate(self, setting: Setting) -> Estimate:
        recipe = setting.on(self.recipe)
        if reasons := recipe.refusals(self.device):
            raise Refused("; ".join(reasons))
        trace = self.tools.predict(recipe, self.device)
        return estimating.estimate(trace, recipe, self.device, self.tools, self.margin)

    def _tell(self, text: str) -> None:
        if self.progress is not None:
            self.progress(len(self.found), self.limit, text)

    def ranked(self) -> list[Setting]:
        """What was compiled and fits, the choice first: with the margin to spare, then by speed; of equals what needs
        least memory."""
        fitting = [setting for setting, estimate in self.found.items() if estimate.fits != "no"]
        return sorted(fitting, key=lambda s: (not self.found[s].safe, *self._cost(s)))

    def too_large(self) -> list[Setting]:
        """What was compiled and does not fit, that which misses least first."""
        large = [setting for setting, estimate in self.found.items() if estimate.fits == "no"]
        return sorted(large, key=lambda s: self.found[s].missing)

    def by_speed(self) -> list[Setting]:
        return sorted(self.found, key=self._cost)

    def _cost(self, setting: Setting) -> tuple[float, int]:
        estimate = self.found[setting]
        return round(estimate.time.step_seconds, 4), estimate.memory.peak_allocated


def search_compiled(
    recipe: Recipe, device: Device, tools: Tools, *, margin: Margin | None = None, limit: int = COMPILATIONS,
    progress: Progress | None = None, choice_alone: bool = False,
) -> Plan:  # fmt: skip
    """The plan of a recipe whose every prediction is a compilation. Arguments and errors are those of `search`."""
    if recipe.mode != "train":
        raise Refused(f"backend: {recipe.backend.name} is planned for training alone; write mode=train, or "
                      "backend=pytorch")
    check_pins(recipe, device)
    plain = resolve(recipe, device)
    search = Round(plain, device, tools, margin or Margin(), limit, progress)
    sizes = micro_batch_sizes(recipe)
    assert plain.micro_batch_size != "auto"
    first = max((each for each in sizes if each <= plain.micro_batch_size), default=sizes[0])
    _explore(search, recipe, first, sizes)
    if not search.found:
        if search.failure is not None:
            raise search.failure
        raise Refused("; ".join(list(dict.fromkeys(search.refused.values()))[:3]))
    if progress is not None:
        progress(len(search.found), len(search.found), "done")
    return _plan(search, recipe, choice_alone)


def _explore(search: Round, recipe: Recipe, first: int, sizes: Sequence[int]) -> None:
    """The four rounds."""
    usual, *others = _precisions(recipe, search)
    layouts = recipe.backend.alternatives()
    kernels = _kernels(recipe, search, usual)
    kinds: list[Checkpointing] = (
        [NoCheckpointing(), EveryBlock()] if recipe.checkpointing == "auto" else [recipe.checkpointing])
    search.compile(Setting(layout, kind, kernels[0], usual, first) for layout in layouts for kind in kinds)
    search.compile(Setting(layouts[0], kind, kernel, usual, first) for kernel in kernels[1:] for kind in kinds[:1])
    if not search.found:
        return
    fastest = search.by_speed()[0]
    search.compile(replace(fastest, backend=layout) for layout in layouts)
    if recipe.checkpointing == "auto":
        search.compile(replace(fastest, checkpointing=kind) for kind in (*kinds, *BETWEEN))
    search.compile(replace(fastest, precision=other, attention=kernel)
                   for other in others for kernel in _kernels(recipe, search, other)[:1])
    for _ in range(2):
        search.compile(_largest(search, first, sizes))
    if not search.ranked():
        search.compile(replace(setting, micro=sizes[0]) for setting in search.too_large()[:2])


def _precisions(recipe: Recipe, search: Round) -> list[Precision]:
    """The usual one first."""
    usual = search.recipe.precision
    assert usual != "auto"
    if recipe.precision != "auto" or isinstance(usual, Fp32):
        return [usual]
    return [usual, Fp32(tf32=search.device.at_least(8))]


def _kernels(recipe: Recipe, search: Round, precision: Precision) -> list[Attention]:
    if recipe.attention != "auto":
        return [recipe.attention]
    choices: tuple[Attention, ...] = (Sdpa(kernel="cudnn"), Sdpa())
    with_it = search.recipe.model_copy(update={"precision": precision})
    return [kernel for kernel in choices if not kernel.refuse(with_it, search.device)]


def _largest(search: Round, first: int, sizes: Sequence[int]) -> list[Setting]:
    """The fastest settings, each at the largest micro-batch that should fit by what is known of it."""
    wanted = []
    seen = dict.fromkeys(replace(setting, micro=first) for setting in search.by_speed())
    for setting in seen:
        known = {s.micro: search.found[s] for s in search.found if replace(s, micro=first) == setting}
        fitting = [micro for micro in sizes if _should_fit(known, micro)]
        if fitting and fitting[-1] not in known:
            wanted.append(replace(setting, micro=fitting[-1]))
    return wanted[:FASTEST]


def _should_fit(known: dict[int, Estimate], micro: int) -> bool:
    """Whether a micro-batch fits, as far as the nearest that was compiled tells: all but weights and states grows with
    the micro-batch at most."""
    if micro in known:
        return known[micro].safe
    near = min(known, key=lambda other: abs(other - micro))
    memory = known[near].memory
    fixed = memory.by_category["weights"] + memory.by_category["optimizer"]
    grown = fixed + (memory.peak_allocated - fixed) * micro / near
    smaller_failed = any(other < micro and not known[other].safe for other in known)
    return not smaller_failed and grown <= memory.capacity - memory.margin


def _plan(search: Round, recipe: Recipe, choice_alone: bool) -> Plan:
    fitting, large, found = search.ranked(), search.too_large(), search.found
    chosen = fitting[0] if fitting else None
    head = chosen or large[0]
    sentences = [] if chosen is None else _why(search, chosen)
    compared = [_compared(found[s], found[head], s.named(head)) for s in fitting[1:]]
    missed = [misses(s.named(None if s is head else head), found[s].memory) for s in large]
    told = [*sentences, *compared[:1]] if chosen is not None else missed[:1]
    texts = [" ".join(told[:1]), *compared] if chosen is not None else []
    shown: list[Candidate] = []
    for setting, text in [*zip(fitting, texts, strict=True)][:SHOWN]:
        shown.append(_candidate(search, setting, told if setting is chosen else [text]))
    for setting, text in [*zip(large, missed, strict=True)][: SHOWN_TOO_LARGE if chosen is not None else SHOWN]:
        shown.append(_candidate(search, setting, told if setting is head else [text]))
    reasons = [f"left out: {reason}" for reason in dict.fromkeys(search.refused.values())]
    return Plan(
        device=search.device, asked=recipe, candidates=tuple(shown), chosen=shown[0] if chosen is not None else None,
        answers=Answers(
            why=" ".join(sentences), next_best=compared[0] if compared and not choice_alone else "",
            would_not_fit=() if choice_alone else tuple(missed[:SHOWN_TOO_LARGE]),
        ),
        notes=tuple(reasons), tried=len(found) + len(search.refused), predictions=len(found),
    )  # fmt: skip


def _candidate(search: Round, setting: Setting, reasons: Sequence[str]) -> Candidate:
    return Candidate(recipe=setting.on(search.recipe), estimate=search.found[setting], reasons=tuple(reasons))


def _why(search: Round, chosen: Setting) -> list[str]:
    estimate = search.found[chosen]
    memory, time = estimate.memory, estimate.time
    in_use = f"{size(min(memory.used, search.device.memory_bytes))} of {size(search.device.memory_bytes)}"
    sentences = [f"The fastest of what was compiled and fits: {time.tokens_per_second or time.samples_per_second:,.0f} "
                 f"{'tokens' if time.tokens_per_second else 'samples'}/s, with {in_use} in use at the peak, in the "
                 f"{memory.peak_in}; {size(memory.margin)} were to stay free."]
    if not estimate.safe:
        sentences.append("It leaves less than the margin free: nothing found leaves more.")
    return sentences


def _compared(estimate: Estimate, best: Estimate, name: str) -> str:
    """What another setting costs beside the choice."""
    faster = faster_by(estimate.time.samples_per_second, best.time.samples_per_second)
    text = beside(faster, estimate.memory.peak_reserved - best.memory.peak_reserved)
    return f"{name}: {text}{'' if estimate.safe else '; it leaves less than the margin free'}."

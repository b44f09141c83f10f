"""A recipe made ready to run on this machine: its device, what `auto` stands for, its data, its build."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tightfit.backends import backend_of, load_backend, quiet_loading
from tightfit.backends.base import Backend
from tightfit.data import GlobalBatchLoader, Prepared, prepare
from tightfit.data.readers import MissingField
from tightfit.data.splitting import Progress
from tightfit.devices import Device, listed_device
from tightfit.errors import RecipeError, Refused, TightfitError, one_line
from tightfit.model_facts import ModelFacts, model_facts, module_facts
from tightfit.models import read_config
from tightfit.planning.defaults import other_than_usual
from tightfit.planning.resolve_auto import resolve_auto
from tightfit.planning.targets import own_target
from tightfit.recipe import Recipe
from tightfit.recipe.lookup import as_recipe
from tightfit.recipe.model_defaults import brings_weights
from tightfit.system import cores
from tightfit.tasks import get_task
from tightfit.text import counted
from tightfit.training.memory_check import check_memory

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from tightfit.data.rows import Rows
    from tightfit.planning.plan import Plan

MOST_WORKERS = 8
"""Worker processes for each core, at most: each takes hundreds of megabytes."""
COUNTED_BYTES = 32 << 20
"""Bytes of text that are prepared before a run, at most, to say how long it takes: some seconds."""
Log = Callable[[str], None]
"""Takes a sentence for the person running this."""


def _for_task(predicts: str) -> Callable[[Recipe, bool], bool]:
    return lambda recipe, _: get_task(recipe.task).predicts == predicts


READ_WHERE: tuple[tuple[str, Callable[[Recipe, bool], bool], str], ...] = (
    ("data.samples", lambda recipe, _: recipe.data.source == "dummy",
     "it counts the examples of data=dummy alone; leave it out, or write max_steps=... for a shorter run"),
    ("data.chat_template", _for_task("next"), "task=causal-lm alone learns conversations; leave it out"),
    ("data.target", _for_task("target"), "task=seq2seq alone learns target texts; write that, or leave it out"),
    ("data.label", _for_task("class"),
     "task=sequence-classification alone learns classes; write that, or leave it out"),
    ("early_stopping_threshold", lambda recipe, _: recipe.early_stopping_patience is not None,
     "no evaluation ends the run; write early_stopping_patience=..., or leave it out"),
    ("eval_steps", lambda _, evaluates: evaluates,
     "nothing is held out to evaluate on; write data.eval_fraction=0.05, or data.eval_source=<other examples>"),
)  # fmt: skip
"""Fields; whether a recipe's run reads one, given whether it has examples to evaluate on; and else the reason."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A resolved recipe, and the backend and device that it runs on.

    module: a model of the caller's own, instead of the one that the recipe names. plan: what filled the fields that
    said `auto`; None where nothing was planned.
    """

    recipe: Recipe
    device: Device
    backend: Backend
    module: Any = None
    plan: Plan | None = None

    @cached_property
    def config(self) -> Any:
        """The configuration of the model that the recipe names, read once; None for a module of the caller's own."""
        return read_config(self.recipe) if self.module is None else None

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts of the model that data needs, such as its vocabulary's size."""
        if self.module is not None:
            return module_facts(self.module, self.recipe)
        return model_facts(self.recipe, self.config)

    def check_memory(self, log: Log) -> None:
        """Raise Refused where this machine's memory cannot hold a step, as `training.memory_check` says. A module of
        the caller's own is not weighed."""
        if self.module is None:
            check_memory(self.recipe, self.device, self.backend, self.config, log)

    def prepare(
        self, dataset: Rows | None = None, progress: Progress | None = None, eval_dataset: Rows | None = None
    ) -> Prepared:
        """The samples of the recipe's data, or of the caller's own `dataset` and `eval_dataset`. Raises DataError."""
        return prepare(self.recipe, self.facts, progress=progress, dataset=dataset, eval_dataset=eval_dataset)

    def utilization(self) -> Callable[[float], float] | None:
        """The model FLOPs utilization (MFU) at so many tokens a second (images: samples); None where the device's peak
        or the model's FLOPs are not known."""
        if self.device.kind != "cuda" or self.module is not None:
            return None
        from tightfit.planning.mfu import model_flops, model_flops_utilization  # where a peak is known

        recipe, device = self.recipe, listed_device(self.device.name)
        if device is None:
            return None
        flops = model_flops(lambda wanted: self.backend.model_size(wanted, self.config), recipe)
        a_sample = 1 if get_task(recipe.task).reads == "images" else recipe.seq_len
        per_token = flops / recipe.batch_size / a_sample
        return (lambda rate: model_flops_utilization(per_token * rate, recipe, device, 1.0)) if flops else None

    def build(self) -> Any:
        """The model with the recipe's techniques applied. Raises Refused."""
        return self.backend.build(self.recipe, self.device, self.module, self.config)


def open_session(recipe: Recipe, log: Log, *, module: Any = None, resumed: bool = False) -> Session:
    """The recipe on its device, with no `auto` left (`planning.resolve_auto`). resumed: whether a run's own recipe
    filled it. Raises Refused where nothing fits, and with all reasons where a technique cannot serve."""
    backend = backend_of(recipe)
    device = backend.device(recipe)
    workers, most = recipe.loading.workers, MOST_WORKERS * cores()
    if workers != "auto" and workers > most:
        raise Refused(f"loading.workers: {workers} processes are too many for this machine's "
                      f"{counted(cores(), 'core')}; write loading.workers={cores()}, or {most} at most")
    if workers != "auto" and workers > cores():
        log(f"note: loading.workers: {workers} processes share this machine's {counted(cores(), 'core')}; write "
            "loading.workers=auto for as many as keep steps from waiting")
    resolved, plan = resolve_auto(recipe, own_target(device), backend, log, module)
    chosen = resumed or recipe.open_choices() or recipe.device != "auto"
    pinned = [] if chosen else other_than_usual(recipe, device)
    if device.kind == "cpu" and pinned:
        log("warning: this machine has no GPU, and the recipe leaves nothing to choose for its processor, as one that "
            f"was planned for a GPU: write {' '.join(f'{field}=auto' for field in pinned)} for what is usual here, or "
            "device=cpu to keep what it says")
    if reasons := resolved.refusals(device):
        raise Refused("; ".join(reasons))
    return Session(recipe=resolved, device=device, backend=backend, module=module, plan=plan)


def recipe_for_machine(
    recipe: Recipe | Mapping[str, Any] | str | Path | TrainingArguments | None, model: Any = None,
    overrides: Iterable[str] = (), training_arguments: Path | None = None,
    rows: Mapping[str, Rows | None] = MappingProxyType({}),
) -> Recipe:  # fmt: skip
    """The recipe that a caller means, as this machine runs it: on CUDA where there is such a device and it may be used.

    The arguments are those of `recipe.lookup.as_recipe`. rows: of the caller's own, by the argument that they are given
    as: the Hugging Face Trainer cuts none, and so by its arguments `seq_len` is what they need, up to the model's
    positions.
    """
    words = list(overrides)
    plain = as_recipe(recipe, model, words, training_arguments=training_arguments)
    found = plain
    if load_backend(plain.backend.name).device(plain).kind == "cuda":
        found = as_recipe(recipe, model, words, cuda=True, training_arguments=training_arguments)
    given = {name: each for name, each in rows.items() if each is not None}
    if (not given or not hasattr(recipe, "per_device_train_batch_size") or get_task(found.task).reads == "images"
            or any(word.partition("=")[0].strip() == "seq_len" for word in words)):
        return found
    from tightfit.data.rows import RowExamples  # for these alone
    from tightfit.recipe.hf_arguments.reading import is_sft_config

    facts = model_facts(found) if model is None or isinstance(model, str) else module_facts(model, found)
    try:
        longest = max(RowExamples.of(each, found, facts, name).longest() for name, each in given.items())
    except MissingField:  # of texts, as of files, documents are cut
        return found
    limits = [found.seq_len] if is_sft_config(recipe) else []  # which cuts rows
    return found.override(seq_len=min(longest, *limits, facts.max_positions or longest))


def require_data(recipe: Recipe, module: Any = None) -> None:
    """Raise RecipeError where a model that was trained before would learn from the usual text, for none is named."""
    if "source" not in recipe.data.model_fields_set and brings_weights(recipe.to_dict(), module):
        model = "your model" if module is not None else repr(recipe.model)
        raise RecipeError(f"data: none is named, and {model} was trained before; write data=<a file, a folder or a "
                          "Hugging Face dataset>, or data=stdlib for the Python standard library's own source")


def unread(recipe: Recipe, evaluates: bool) -> list[str]:
    """A sentence on each field that says other than by default and that the recipe's run does not read. Values count,
    for the recipe of a run names every field.

    evaluates: whether there are examples to evaluate on.
    """
    notes = []
    for field, is_read, reason in READ_WHERE:
        section, _, name = field.rpartition(".")
        owner = getattr(recipe, section) if section else recipe
        value = getattr(owner, name)
        if value != type(owner).model_fields[name].default and not is_read(recipe, evaluates):
            notes.append(f"{field}: {value} has no effect: {reason}")
    return notes


def training_global_batches(recipe: Recipe) -> GlobalBatchLoader:
    """The global batches that a resolved recipe trains on, all of one size, for steps that are timed."""
    return GlobalBatchLoader(prepare(recipe, model_facts(recipe)).train, recipe, drop_last=True)


def tokens_of_epochs(recipe: Recipe, log: Log, progress: Progress | None = None) -> int:
    """The tokens, padding included, or images of a run of `num_train_epochs` over data that is here, which is prepared
    for that. 0 where the recipe counts steps, where its data is elsewhere or more than `COUNTED_BYTES` of text, and
    where it cannot be prepared, which is logged."""
    source, images = Path(recipe.data.source).expanduser(), get_task(recipe.task).reads == "images"
    if recipe.num_train_epochs is None or not source.exists():
        return 0
    try:
        files = () if images else (path for path in (source, *source.rglob("*")) if path.is_file())
        if sum(path.stat().st_size for path in files) > COUNTED_BYTES:
            return 0
        with quiet_loading():
            samples = len(prepare(recipe, model_facts(recipe), progress=progress).train)
    except (TightfitError, OSError) as error:
        log(f"note: how long {recipe.num_train_epochs:g} epochs take is not known: {one_line(error)}")
        return 0
    return round(recipe.num_train_epochs * samples) * (1 if images else recipe.seq_len)

"""What a run says as it begins and leaves behind as it ends: its model's folder, sample and summary."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from tightfit.backends.base import Step
from tightfit.backends.world import World
from tightfit.data import Prepared
from tightfit.data.tokenizing import name_end
from tightfit.devices import find_device
from tightfit.errors import CheckpointError, OutOfMemory, RecipeError
from tightfit.models import OUR_TRANSFORMER, resolve_source
from tightfit.recipe import Recipe
from tightfit.tasks import get_task
from tightfit.training import checkpoints
from tightfit.training.records import Summary, metrics_text
from tightfit.training.run_folder import RunFolder
from tightfit.training.session import Session
from tightfit.training.state import TrainerState

SAMPLE_TOKENS = 160


def beginning(recipe: Recipe, step: Step, data: Prepared, global_batches: int, named: bool) -> str:
    """One line on what is about to be trained."""
    weights = ""
    if named and resolve_source(recipe).kind == "bundled":
        weights = " from random weights (a bundled shape; a Hugging Face id or folder brings its own)"
    model = recipe.model if named else "your model"
    if step.active_parameters != step.parameter_count:
        weights = f", of which a token meets {step.active_parameters:,}{weights and ','}{weights}"
    return (f"{model}: {step.parameter_count:,} parameters{weights}; {len(data.train):,} training samples, "
            f"{global_batches:,} steps an epoch; micro_batch_size {recipe.micro_batch_size}")


def utilization(session: Session) -> Callable[[float], float] | None:
    """The MFU at so many tokens a second (images: samples); None where the device's peak or the model's FLOPs are not
    known."""
    if session.device.kind != "cuda" or session.module is not None:
        return None
    from tightfit.planning.standard_tools import model_flops, model_flops_utilization  # where a peak is known

    recipe = session.recipe
    try:
        device = find_device(session.device.name)
    except RecipeError:  # not in the catalogue
        return None
    flops = model_flops(lambda wanted: session.backend.model_size(wanted, session.config), recipe)
    a_sample = 1 if get_task(recipe.task).reads == "images" else recipe.seq_len
    per_token = flops / recipe.batch_size / a_sample
    return (lambda rate: model_flops_utilization(per_token * rate, recipe, device, 1.0)) if flops else None


def load_best(
    step: Step, state: TrainerState, folder: RunFolder, world: World, say: Callable[[str], None]
) -> None:
    """Put the best checkpoint's weights into the model, and its metrics in the place of the last ones."""
    if state.best_step in (None, state.step):
        return
    assert state.best_step is not None
    place = checkpoints.folder_of(folder.checkpoints, state.best_step)
    try:
        found = world.broadcast_from_rank0(lambda: checkpoints.read(place))
    except CheckpointError as error:
        say(f"load_best_model_at_end: the best checkpoint cannot be read ({error}); the model is the last step's")
        return
    step.load(found.folder, found.meta)
    state.evaluation = state.best_metrics
    say(f"the finished model is that of step {state.best_step}: held-out {metrics_text(state.evaluation)}")


def finish_model(model: Path, recipe: Recipe, data: Prepared, session: Session) -> None:
    """Write beside the model what its inputs are made with: the tokenizer, or the image processor."""
    if data.tokenizer is not None:
        data.tokenizer.save(model)
        if recipe.task in ("causal-lm", "seq2seq"):
            name_end(model, data.tokenizer.end_id, data.turn_end)
    if data.from_images:
        from tightfit.data.sources import image_processor

        written = json.dumps(image_processor(session.facts), indent=2)
        (model / "preprocessor_config.json").write_text(written + "\n", encoding="utf-8")


def loaded_by(model: Path, recipe: Recipe) -> str | None:
    """A line on how others load the model; None where nothing but tightfit does."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    name = get_task(recipe.task).auto_class
    if (model / "adapter_config.json").is_file():
        if recipe.task in ("causal-lm", "seq2seq", "sequence-classification"):  # peft has no class for others
            peft = name.replace("AutoModel", "AutoPeftModel")
            return f"the adapter loads with peft: {peft}.from_pretrained({str(model)!r})"
        return f"the adapter loads with peft: PeftModel.from_pretrained(<its base model>, {str(model)!r})"
    if config.get("model_type", OUR_TRANSFORMER) == OUR_TRANSFORMER:
        return None
    return f"the model loads with transformers: {name}.from_pretrained({str(model)!r})"


def sample(recipe: Recipe, step: Step, data: Prepared, say: Callable[[str], None]) -> str | None:
    """The recipe's prompt, continued by the trained model; None where there is none to continue."""
    if recipe.sample_prompt is None or recipe.task != "causal-lm" or data.tokenizer is None:
        return None
    try:
        prompt = data.tokenizer.encode_prompt(recipe.sample_prompt)
    except (TypeError, UnicodeError):  # such as a lone surrogate
        prompt = []
    if not prompt:
        say("no sample: sample_prompt holds no token to begin with")
        return None
    try:
        tokens = step.generate(prompt, SAMPLE_TOKENS, temperature=0.7, seed=recipe.seed)
    except OutOfMemory as error:
        say(f"no sample: {error}")
        return None
    if data.tokenizer.end_id in tokens:
        tokens = tokens[: tokens.index(data.tokenizer.end_id)]
    return recipe.sample_prompt + data.tokenizer.decode(tokens)


def summarize(
    session: Session, step: Step, data: Prepared, state: TrainerState, path: Path, began: float, world: World
) -> Summary:
    """The run's figures. path: of its folder. began: when, by time.perf_counter."""
    seconds = state.training_seconds or 1e-9
    return Summary(
        steps=state.step,
        first_step=state.first_step,
        skipped_steps=state.skipped_steps,
        parameters=step.parameter_count,
        active_parameters=step.active_parameters,
        output_dir=str(path),
        seconds=time.perf_counter() - began,
        training_seconds=state.training_seconds,
        compile_seconds=step.compile_seconds,
        data_wait_seconds=state.data_wait_seconds,
        samples_per_second=state.samples / seconds,
        tokens_per_second=state.tokens / seconds,
        tokens_seen=state.tokens_seen,
        peak_memory=int(world.all_reduce_max(step.peak_memory())),
        context_memory=step.context_memory(),
        device=session.device.name,
        loss=state.losses[-1] if state.losses else None,
        unigram_loss=data.unigram_loss,
        attention_kernels=step.attention_kernels,
        experts_functions=step.experts_functions,
        metrics={name: metric.mean for name, metric in state.metrics.items()},
        inexact=tuple(name for name, metric in state.metrics.items() if not metric.adds_up),
        stopped_by=state.stopped_by,
        early_stopped=state.early_stopped,
        best_step=state.best_step,
        losses=tuple(state.losses),
        **state.evaluation,
    )

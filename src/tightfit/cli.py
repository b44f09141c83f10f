"""The command line: thin. Errors a person can act on are one line and exit status 2."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tightfit.commands.arguments import RECIPE, AsJson, GpuMemory, Overrides, RecipeName, TrainingArgs
from tightfit.commands.completion import complete_gpu, complete_override

app = typer.Typer(
    name="tightfit",
    help="Fit a bigger transformer on one GPU, and train it faster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from tightfit import __version__

        typer.echo(f"tightfit {__version__}")
        raise typer.Exit
    from tightfit.backends import CHATTY

    for name in CHATTY:  # what libraries log about themselves while they load stays off the screen, errors do not
        logging.getLogger(name).setLevel(logging.ERROR)


@app.command(context_settings={"ignore_unknown_options": True})  # they reach the overrides, which say what to write
def train(
    recipe: Annotated[str | None, RECIPE] = None, overrides: Overrides = None, training_args: TrainingArgs = None
) -> None:
    """Train a model by a recipe; the same command resumes it where it stopped.

    Example: `tightfit train gpt2 data=notes.txt seq_len=512 precision=bf16`. Every field is in docs/recipe.md.
    """
    from tightfit.commands.train import run_train

    raise typer.Exit(run_train(recipe, overrides or [], training_args))


@app.command(context_settings={"ignore_unknown_options": True})
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN_DIR|RECIPE", help="A run's folder, a checkpoint's in it, a saved "
                                       "model's, or a recipe of a model that was trained before.")],
    overrides: Overrides = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Measure a trained model's loss, and accuracy, on examples of your own, or those that its run held out.

    Example: `tightfit evaluate runs/mine data=test.csv`. All examples are read; `eval_samples=1000` reads so many.
    """
    from tightfit.commands.evaluate import run_evaluate

    run_evaluate([run, *(overrides or [])], as_json)


@app.command(context_settings={"ignore_unknown_options": True})
def plan(
    recipe: Annotated[str | None, RECIPE] = None,
    overrides: Overrides = None,
    gpu: Annotated[list[str] | None, typer.Option(
        metavar="NAME", autocompletion=complete_gpu, help="A GPU such as `rtx-4090` (`tightfit gpus` lists them), "
        "several as `l4,rtx-4090`, `all`, or `cpu` for this machine's processor; by default its own GPU.")] = None,
    gpu_memory: GpuMemory = None,
    host_memory: Annotated[str | None, typer.Option(
        metavar="SIZE", help="Memory such as `64GB` of the machine around the GPU, for what waits there.")] = None,
    gpus: Annotated[str | None, typer.Option(
        metavar="N", help="Such GPUs in a machine, which train together; `--gpu 8xh100-sxm` says the same.")] = None,
    nodes: Annotated[str | None, typer.Option(metavar="N", help="Such machines.")] = None,
    network: Annotated[str | None, typer.Option(
        metavar="SPEED", help="What each machine sends to the others in a second, such as `100Gbit` or `8x400Gbit`.",
    )] = None,
    as_json: AsJson = False,
    price: Annotated[list[str] | None, typer.Option(
        metavar="NAME=x", help="With several GPUs: what each costs an hour, in any unit; once for each GPU. With "
        "one GPU, and `--tokens` or `max_steps`: its price alone.")] = None,
    tokens: Annotated[str | None, typer.Option(
        metavar="COUNT", help="Tokens of a whole run, such as `1B`, in place of `max_steps`: its length, its cost.",
    )] = None,
    training_args: TrainingArgs = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the plan as an offline page.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the chosen recipe, for `train`.")] = None,
    longest: Annotated[str | None, typer.Option(
        metavar="seq_len", help="The longest sequences that fit, and the plan of these.")] = None,
    largest: Annotated[str | None, typer.Option(
        metavar="WHAT", help="The largest `micro_batch_size` that fits, or the largest bundled model of a quoted "
        "pattern such as `'model=qwen2.5-*'`, and the plan of it.")] = None,
    top: Annotated[str | None, typer.Option(metavar="N", help="Show only the N best.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all that is known of a plan.")] = False,
) -> None:  # fmt: skip
    """Predict memory and speed of every set of techniques on GPUs that need not be in this machine, and choose.

    Example: `tightfit plan gpt2 seq_len=1024 --gpu rtx-4090`. How to read it is in docs/plan.md.
    """
    from tightfit.commands.plan import PlanOptions, run_plan

    run_plan(recipe, overrides or [], PlanOptions(
        gpus=gpu or [], gpu_memory=gpu_memory, host_memory=host_memory, count=gpus, nodes=nodes, network=network,
        as_json=as_json, prices=price or [], tokens=tokens, training_arguments=training_args, longest=longest,
        largest=largest, html=html, save=save, top=top, verbose=verbose,
    ))  # fmt: skip


@app.command(context_settings={"ignore_unknown_options": True})
def profile(
    recipe: RecipeName,
    overrides: Overrides = None,
    gpu: Annotated[str | None, typer.Option(
        metavar="NAME", autocompletion=complete_gpu, help="A GPU that need not be in this machine, or a size such "
        "as `24GB`: the step is predicted for it, and not run.")] = None,
    output: Annotated[Path | None, typer.Option(
        metavar="FILE", help="Where the report goes; by default into the run's folder.")] = None,
) -> None:  # fmt: skip
    """Measure a few real training steps and their prediction, and draw where every byte and millisecond went.

    Example: `tightfit profile gpt2 data=notes.txt seq_len=512`; with `--gpu rtx-4090` as predicted for that card. How
    to read the report is in docs/report.md.
    """
    from tightfit.commands.profile import run_profile

    run_profile(recipe, overrides or [], output, gpu)


@app.command(context_settings={"ignore_unknown_options": True})
def compare(
    recipe: RecipeName,
    others: Annotated[list[str] | None, typer.Argument(
        metavar="[RECIPE] [KEY=VALUE]...", autocompletion=complete_override, help="Another recipe, or none, and fields "
        "to set in it; with fields alone the same one with these.")] = None,
    gpu: Annotated[str | None, typer.Option(
        metavar="NAME", autocompletion=complete_gpu, help="A GPU such as `rtx-4090`, or `cpu`; by default this "
        "machine's own GPU.")] = None,
    gpu_memory: GpuMemory = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Predict what a change of fields does to a step's memory and time, by category.

    Example: `tightfit compare mine.yaml checkpointing=every-block --gpu rtx-4090`.
    """
    from tightfit.commands.compare import run_compare

    run_compare(recipe, others or [], gpu, gpu_memory, as_json)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A folder of a run or a profile.")],
    other: Annotated[Path | None, typer.Argument(metavar="[OTHER]", help="Another one to compare with.")] = None,
    output: Annotated[Path | None, typer.Option(
        metavar="FILE", help="Where the report goes; by default into RUN_DIR.")] = None,
) -> None:  # fmt: skip
    """Draw a profile as one HTML file that opens offline: memory, time, predicted against measured, what to change."""
    from tightfit.commands.report import run_report

    run_report(run_dir, other, output)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A finished run's folder.")],
    merge: Annotated[bool, typer.Option("--merge", help="Work its adapter into the weights.")] = False,
    output: Annotated[Path | None, typer.Option(
        metavar="FOLDER", help="Where the model goes; by default `merged` in RUN_DIR.")] = None,
) -> None:  # fmt: skip
    """Write the model of a run that trained an adapter, with the adapter merged into its weights.

    Example: `tightfit export runs/mine --merge`. What `model/` holds is in docs/adapters.md.
    """
    from tightfit.commands.export import run_export

    run_export(run_dir, merge, output)


@app.command(context_settings={"ignore_unknown_options": True})
def ladder(
    name: Annotated[str, typer.Argument(
        metavar="NAME|RECIPE", help="bert-large, fp16-batch, accumulation, checkpointing, loading, ddp, "
        "transformer-156m, transformer-156m-jax, or a recipe: what it leaves `auto` makes the rungs.")],
    overrides: Overrides = None,
    gpu: Annotated[str | None, typer.Option(
        metavar="NAME", autocompletion=complete_gpu, help="A GPU to predict the full size for, or a size such as "
        "`24GB`; by default the one that figures were published on, where this machine has none.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(
        metavar="SIZE", help="Memory such as `24GB` that this machine's GPU is cut down to.")] = None,
    peer: Annotated[list[str] | None, typer.Option(
        metavar="PEER", help="Run the same rungs by `plain` (a bare loop) or `hf-trainer` too; once for each.",
    )] = None,
    scale: Annotated[str | None, typer.Option(
        metavar="SCALE", help="`full`, `reduced` (minutes on a processor) or `smallest`; by default as the machine "
        "is.")] = None,
    steps: Annotated[int | None, typer.Option(
        min=1, max=1_000_000, metavar="N", help="Timed steps of each rung.")] = None,
    limit: Annotated[float | None, typer.Option(
        min=1, max=604_800, metavar="SECONDS", help="The most that one rung may take; by default ten minutes.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Name the rungs, and run none.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run and predict anew what has a result already, such as after "
                                        "a change of your model's code.")] = False,
) -> None:  # fmt: skip
    """Measure every technique's effect on this machine, a rung at a time, next to published and predicted figures.

    Example: `tightfit ladder bert-large`. It resumes where it was stopped. How to read it is in docs/ladder.md.

    Exit status: 0, or 1 where no rung came to figures.
    """
    from tightfit.commands.ladder import run_ladder

    raise typer.Exit(run_ladder(name, overrides or [], gpu=gpu, gpu_memory=gpu_memory, peers=peer or [], scale=scale,
                                steps=steps, limit=limit, listed=listed, fresh=fresh))


@app.command()
def gpus() -> None:
    """List the GPUs that a plan can be made for."""
    from rich.console import Console

    from tightfit.display.gpu_tables import gpu_table

    Console().print(gpu_table())


@app.command()
def doctor(
    as_json: AsJson = False,
    no_disk: Annotated[bool, typer.Option("--no-disk", help="Leave the disk's speed unmeasured.")] = False,
    calibrate: Annotated[bool, typer.Option(
        "--calibrate", help="Measure instead how fast this machine really is, for plans.")] = False,
    device: Annotated[str, typer.Option(
        metavar="DEVICE", help="With `--calibrate`: `cuda` or `cpu`; `auto` takes the GPU where there is one.",
    )] = "auto",
) -> None:  # fmt: skip
    """Look this machine over: cards, driver, versions, links, disk; what stops or slows training, and what to do.

    Exit status: 0, or 1 where something stops training. What it looks at is in docs/doctor.md.
    """
    from tightfit.errors import RecipeError

    if device != "auto" and not calibrate:
        raise RecipeError(f"device: {device!r} says what to calibrate; write --calibrate with it, or leave it out")
    from tightfit.commands.doctor import run_calibration, run_doctor

    if calibrate:
        run_calibration(device, as_json)
    else:
        raise typer.Exit(run_doctor(as_json, disk=not no_disk))


@app.command()
def recipes() -> None:
    """List the bundled recipes and models."""
    from tightfit.bundled import BUNDLED, bundled_recipes

    typer.echo("\n".join(["recipes", *(f"  {name}" for name in bundled_recipes()), "models, each also a recipe's name",
                          *(f"  {name:<18} {BUNDLED[name].task}" for name in sorted(BUNDLED))]))


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, by which an editor completes and checks them.

    Example: `tightfit schema > recipe.schema.json`, and as the first line of a recipe beside it
    `# yaml-language-server: $schema=recipe.schema.json`.
    """
    import json

    from tightfit.recipe.json_schema import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=2))


def main() -> None:
    """Run the command line. Exit status: 0 done, 1 done with the answer no (doctor found a fault, no rung came to
    figures, one of several processes ended), 2 something to change, said in one line, 128 + n after signal n."""
    from tightfit.errors import ending

    if isinstance(sys.stdout, io.TextIOWrapper):  # in an encoding such as Windows' cp1252, not every sign can be said
        sys.stdout.reconfigure(errors="replace")
    if os.environ.get("COLUMNS") == "0":  # of a terminal that knows no width; nothing would be written in none
        del os.environ["COLUMNS"]
    try:
        app(standalone_mode=True)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        said, status = ending(error)
        if said:
            typer.echo(f"tightfit: {said}", err=True)
        sys.exit(status)


if __name__ == "__main__":
    main()

"""`tightfit profile`: a few real steps measured, the same step predicted, both kept and drawn as a report."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from tightfit.backends.measurements import Measurement
from tightfit.commands.report import run_report
from tightfit.errors import ReportError, install_command, remedy
from tightfit.files import unfinished_folder
from tightfit.planner import target_for
from tightfit.planning.plan import Plan
from tightfit.profiling import CHROME_TRACE, FOLDER, UNFINISHED, XPLANE
from tightfit.profiling.measure import keep_profile, predicted_profile, profile_recipe
from tightfit.profiling.profile import Profile, home_of, load
from tightfit.recipe.lookup import load_recipe, name_and_overrides
from tightfit.training.listeners import Terminal
from tightfit.training.run_folder import PLAN, RunFolder, folder_name, run_path
from tightfit.training.session import recipe_for_machine


def run_profile(name: str, overrides: Sequence[str] = (), output: Path | None = None, gpu: str | None = None) -> Path:
    """Measure the recipe's step on this machine, and predict it; the report's path.

    The run's folder gets `profile/`, `trace.json.gz` for Perfetto, on CUDA `memory.pickle` for PyTorch's memory_viz,
    and `report.html`, or `output` instead. gpu: a card that need not be present, for which the step is predicted and
    not run; the folder is then one of its own, or `output_dir` where that is an override and holds no measured profile.
    Raises TightfitError.
    """
    name, overrides = name_and_overrides([name, *overrides])
    console = Console(stderr=True, soft_wrap=True)
    try:
        if gpu is not None:
            return run_report(_predicted(name, overrides, gpu, console), output=output)
        folder = _measured(name, overrides, console)
    except OSError as error:
        raise ReportError(f"{error.filename or output or name}: cannot be written ({error.strerror or error}); "
                          f"{remedy(error, 'write another output_dir=...')}") from None
    path = run_report(folder, output=output)
    if (folder / FOLDER / XPLANE).exists():
        install = "" if find_spec("xprof") else f"; install it with: {install_command('xprof')}"
        viewers = f"{folder / CHROME_TRACE} in ui.perfetto.dev, or: xprof --logdir {folder / FOLDER}{install}"
        Console(soft_wrap=True).print(f"trace: {viewers}", markup=False, highlight=False)
    return path


def _measured(name: str, overrides: Sequence[str], console: Console) -> Path:
    """A profile of real steps; the run's folder, which it was written to."""
    recipe = recipe_for_machine(name, overrides=overrides)
    folder = run_path(recipe, name)
    folder.mkdir(parents=True, exist_ok=True)
    # The trace lies aside until the rest is there: an interrupted profile leaves the one before it whole.
    with unfinished_folder(folder, UNFINISHED) as aside, Terminal(console) as terminal:
        trace = aside / CHROME_TRACE
        profile, measured, plan = profile_recipe(recipe, listener=terminal, chrome_trace=trace)
        _kept(profile, measured, plan, folder)
        if trace.exists():
            trace.replace(folder / CHROME_TRACE)
    return folder


def _predicted(name: str, overrides: Sequence[str], gpu: str, console: Console) -> Path:
    """A profile of a prediction alone; the folder that it was written to."""
    target = target_for(load_recipe(name, overrides, cuda=False), gpu)
    recipe = load_recipe(name, overrides, cuda=target.device.kind == "cuda")
    with Terminal(console) as terminal:
        profile, plan = predicted_profile(recipe, target, terminal.message)
    folder = run_path(recipe, name)
    written = any(word.startswith("output_dir=") for word in overrides)
    if not written or (home_of(folder) is not None and load(folder).measured is not None):  # which stays
        folder = folder.parent / f"{folder.name or 'profile'}-on-{folder_name(gpu)}"
    return _kept(profile, None, plan, folder)


def _kept(profile: Profile, measured: Measurement | None, plan: Plan | None, folder: Path) -> Path:
    """The folder, with the profile and its plan, which lies beside it: the folder may hold the plan of a run."""
    home = keep_profile(profile, measured, folder)
    if plan is not None:
        RunFolder(home).write_json(PLAN, plan.to_json())
    return folder

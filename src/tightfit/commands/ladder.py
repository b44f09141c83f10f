"""`tightfit ladder`: a ladder run, shown as a table and drawn as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tightfit.devices import parse_memory
from tightfit.errors import RecipeError, Refused, UnknownRecipe, nearest, writing
from tightfit.files import write_atomically
from tightfit.ladder.catalogue import ladder_of, ladders
from tightfit.ladder.peers import PEERS, check_rows
from tightfit.ladder.results import rung_results
from tightfit.ladder.rows import OURS
from tightfit.ladder.run import RUNG_SECONDS, LadderRun, run_rungs, this_machine
from tightfit.ladder.rungs import SCALES, STEPS_OF_SCALE, Ladder, Scale, card
from tightfit.ladder.table import show
from tightfit.recipe.lookup import load_recipe, recipe_hint
from tightfit.system import interrupted_by_signals

FOLDER, OUTPUT, PAGE = "ladders", "output_dir", "ladder.html"


def run_ladder(
    name: str, overrides: Sequence[str] = (), *, gpu: str | None = None, gpu_memory: str | None = None,
    peers: Sequence[str] = (), scale: str | None = None, steps: int | None = None, limit: float | None = None,
    listed: bool = False, fresh: bool = False,
) -> int:  # fmt: skip
    """Run a ladder of that name, or of a recipe; show it, draw it, and return an exit status: 1 where no rung came to
    figures, 0 otherwise. One that is stopped by Ctrl-C is shown and drawn as far as it came.

    overrides: fields of every rung; `output_dir` takes the results. gpu: a card to predict the full size for, by
    its name or a size such as `24GB`. gpu_memory: a size such as `24GB` that this machine's GPU is cut down to.
    peers: whose loops run the same rungs. scale: full, reduced or smallest; by default full where the rungs run on
    a GPU, and reduced elsewhere. limit: seconds for one rung, ten minutes by default. listed: whether to
    name the rungs and run none. fresh: whether rungs that have a row are run anew. Raises TightfitError for bad input,
    and Refused after printing where every rung was refused.
    """
    fields = [word for word in overrides if word.partition("=")[0] != OUTPUT]
    given = [word.partition("=")[2] for word in overrides if word.partition("=")[0] == OUTPUT]
    ladder, fields = _ladder(name, fields)
    chosen = _scale(scale, ladder)
    for peer in peers:
        if peer not in PEERS:
            raise RecipeError(f"peer: {peer!r} is not a known trainer; {nearest(peer, PEERS)}")
    memory = None if gpu_memory is None else parse_memory(gpu_memory)
    if gpu is not None:
        card(gpu)  # an unknown name is said before anything runs
    if listed:
        print(*(rung.name for rung in ladder.rungs), sep="\n")
        return 0
    if peers:
        check_rows(ladder.recipe(ladder.rungs[0], overrides=fields))  # said before the minutes that rungs take
    limit = limit or RUNG_SECONDS
    machine = this_machine(ladder.recipe(ladder.rungs[0], chosen or "reduced", fields), limit)
    if memory is not None and machine.kind != "cuda":
        raise RecipeError("gpu-memory: this machine has no GPU to cut down; leave it out, or write --gpu with a name "
                          "or a size to predict the full size for")
    if chosen is None:
        chosen = "full" if machine.kind == "cuda" else "reduced"
    if gpu is None and chosen != "full":
        gpu = ladder.gpu  # away from a GPU the full size is predicted for the card that it was published on
    warm_up, timed = STEPS_OF_SCALE[chosen]
    console = Console(stderr=True, soft_wrap=True)
    run = LadderRun(
        ladder=ladder, scale=chosen, folder=Path(given[-1] if given else Path(FOLDER) / ladder.name).expanduser(),
        machine=machine, log=lambda text: console.print(text, markup=False, highlight=False), overrides=fields,
        runners=tuple(dict.fromkeys((OURS, *peers))), warm_up=warm_up, steps=steps or timed, limit=limit,
        gpu=gpu, memory=memory, fresh=fresh,
    )  # fmt: skip
    refused = [run.refusals(rung) for rung in ladder.rungs]
    shared = [reason for reason in refused[0] if all(reason in reasons for reasons in refused)]
    if shared and gpu is None:  # another card may have what this machine lacks
        raise Refused("; ".join(shared))
    try:
        with interrupted_by_signals():
            run_rungs(run)
    except KeyboardInterrupt:
        if any(result.measured is not None for result in rung_results(run)):
            _present(run)
        run.log(f"stopped; the rows so far are kept in {run.path}, and the same command resumes it"
                if run.path.exists() else "stopped; no rung has a row yet")
        raise
    _present(run)
    return _exit_status(run)


def _present(run: LadderRun) -> None:
    """Print the ladder's table and say where its results and its page are. Raises ReportError where the page cannot be
    written."""
    from tightfit.ladder.page import page  # which loads what draws

    show(run, Console())
    run.log(f"results: {run.path}")
    path = run.path.with_name(PAGE)
    with writing(f"{path}: the page", "write output_dir=... elsewhere (the results are kept)"):
        write_atomically(path, page(run))
    run.log(f"page: {path}")


def _exit_status(run: LadderRun) -> int:
    """0 where anything was measured. Raises Refused where nothing can be, on this machine or with this recipe."""
    statuses = {result.measured.status for result in rung_results(run) if result.measured is not None}
    if statuses == {"refused"}:
        raise Refused("no rung can run here; what to write instead is said of each above")
    return 0 if "done" in statuses else 1


def _ladder(name: str, fields: list[str]) -> tuple[Ladder, list[str]]:
    """The ladder of a name or a recipe, and the overrides that are left for its rungs: a recipe's has them in its base.
    """
    if name not in ladders():
        try:
            return ladder_of(load_recipe(name, fields), name), []
        except UnknownRecipe:
            hint = (recipe_hint(name, ladders())
                    or f"the ladders: {', '.join(ladders())}; or a recipe: see tightfit recipes")
            raise UnknownRecipe(f"{name!r} is neither a ladder nor a recipe; {hint}") from None
    ladder = ladders()[name]
    if "backend=jax" in fields:
        ladder = ladders()[ladder.in_jax or name]
        if not ladder.backend.runs_torch:
            fields = [field for field in fields if field != "backend=jax"]
    _check_free(fields, ladder)
    return ladder, fields


def _check_free(fields: Sequence[str], ladder: Ladder) -> None:
    """Raise RecipeError for an override of a field that rungs change: they would not be what they are called."""
    taken = {field for rung in ladder.rungs for field in rung.changes}
    for word in fields:
        field = word.partition("=")[0].partition(".")[0]
        if field in taken:
            raise RecipeError(f"{field}: the rungs of {ladder.name} set it themselves; leave it out, or run a ladder "
                              f"of your own recipe, such as tightfit ladder mine.yaml {word}")


def _scale(asked: str | None, ladder: Ladder) -> Scale | None:
    """The scale that was asked for, or the only one that there is; None where the machine decides."""
    if asked is None:
        return None if ladder.shrunk else "full"
    if asked not in SCALES:
        raise RecipeError(f"scale: {asked!r} is not a scale; write one of {', '.join(SCALES)}")
    if asked != "full" and not ladder.shrunk:
        raise RecipeError(f"scale: {asked!r} is for the ladders that have a name; a recipe's ladder runs as it is, so "
                          "write smaller fields, such as model_overrides.n_layer=2")
    return asked

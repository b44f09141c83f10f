"""The ladders' page: how to read one, and the tables of those that are recorded in results/ladder-*.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import recorded as records
from ladder_differences import DIFFERENCES, What
from tightfit.devices import MIB
from tightfit.ladder.catalogue import guides, ladders
from tightfit.ladder.peers import title_of
from tightfit.ladder.results import (
    QUANTILES,
    Effect,
    RungResult,
    effects,
    figures_of,
    heading,
    rung_results,
    spreads,
    times,
)
from tightfit.ladder.rows import OURS, Predicted, Rows, read
from tightfit.ladder.run import LadderRun
from tightfit.ladder.rungs import STEPS_OF_SCALE, Ladder, Rung, Scale
from tightfit.ladder.table import cells, notes

FULL_SIZE = ("bert-large", "transformer-156m")
"""The ladders that were published from one card."""
EXPLAINED = 10.0
"""Percent above which a difference from what was published is explained."""

READING = """\
- **A rung** is one recipe that differs from another in one technique. It runs in a process of its own: a warm-up, the
  timed steps, and one more step whose memory is measured. What fails, runs out of memory or is refused is a row too.
- **s/step** is the median of the timed steps, ± half the distance of their quartiles, **samples/s** what that makes.
  **MiB** is what the driver reports for the process, context and all that the allocator holds; on a processor, and in
  the notebook's ladder as it was published, the most that a step's tensors take at once.
- **Noise.** Where half of a rung's steps lie further than 25 % apart, as on a busy machine, or its speed is ten times
  off its neighbours', it is measured in up to two further rounds. What stays noisy says so, and a speed that lies
  within the spread of both rungs has a `~` behind it; rungs of one recipe have one spread.
- **speed and memory** are factors of the rung that this one stands against: 0.75x is a quarter slower, or a quarter
  less memory. A technique's effect is that factor, on that model and card.
- **pred.** is what the plan says of the same recipe on the same device; it knows nothing of the measurement, and is
  made after it, so that the first figures are not waited for; without a calibration its
  times are rough ([plan](plan.md)). Under `backend: jax` nothing is predicted for a processor.
- **publ.** is what was published, with other software, on the card that stands above the table. It is compared at full
  size alone, and with figures of that same card.
- **Scales.** A GPU runs the full size; a processor the reduced one, of the same rungs and fewer, narrower layers;
  `smallest` is for trying. At a smaller scale the full size is predicted for the card of the published figures.
- **Peers** run the same model, weights, data, seed and number of steps by their own loop; the bare loop is
  `--peer plain`. Rows that documents share are no peer's: a recipe with text needs `data.packing=false`. Where the
  losses of a step lie apart, a row is marked as not the same work, and its ratio counts for nothing.
- **results.jsonl** is only ever added to, by one ladder at a time. A ladder that is stopped by Ctrl-C or SIGTERM
  shows and draws what it has, and resumes at the first rung without a row; what failed or was killed is tried again.
  A rung is measured and predicted anew where the recipe, the machine or the version of a library that it uses is
  another. `--fresh` runs and predicts everything anew: write it after a change of your model's code, of your data, of
  a calibration or of tightfit itself.
- **The exit status** is 0 where any rung came to figures, 1 where none did, and 2 where every one was refused or what
  was asked for is wrong."""


def ladder_page() -> Iterator[str | records.Table]:
    """The page's parts."""
    runs = recorded_ladders()
    yield "# Ladders"
    yield ("A ladder measures what each technique does on the machine at hand, one rung after the other, next to "
           "published and predicted figures.")
    yield ("```\n"
           "tightfit ladder bert-large                        # BERT-large by the guide's nine rungs, and newer ones\n"
           "tightfit ladder bert-large --peer hf-trainer      # the same rungs by another trainer\n"
           "tightfit ladder bert-large --scale reduced        # minutes on a processor\n"
           "tightfit ladder bert-large --gpu 24GB             # predicted at full size for a card of that size\n"
           "tightfit ladder mine.yaml                         # each technique that your recipe leaves open\n"
           "tightfit ladder mine.yaml --list                  # their names alone; a field that you pin makes none\n"
           "```")
    yield ("It prints a table, and writes `results.jsonl` and a page that opens offline: time and memory as bars, "
           "throughput against memory with its Pareto front, the features' factors, what did not run and why.")
    yield ("ladder", "model and data", "published on"), [
        (f"`{name}`", ladder.title, ladder.published_on or "-") for name, ladder in ladders().items()]
    yield "## How to read it"
    yield READING
    yield "## Recorded"
    if not any(run.machine.kind == "cuda" for run, _ in runs):
        yield "Not yet measured on a GPU."
    for run, path in runs:
        yield from _one(run, path)
    yield from _features(runs)
    yield from _full_size()


def recorded(path: Path) -> LadderRun | None:
    """The last ladder of a results file: of the machine and the scale that its last measurement has; None of a file
    without one.

    Rows are found by the names of their rungs. Their keys are of the day on which they were measured, and a recipe may
    have other fields since.
    """
    rows = read(path)
    if not rows.measured:
        return None
    last = rows.measured[-1]
    ladder, scale = ladders()[last.ladder], cast(Scale, last.scale)
    rungs = {rung.name: rung for rung in ladder.rungs}
    measured = [row for row in rows.measured
                if (row.ladder, row.scale) == (last.ladder, last.scale) and row.rung in rungs]
    predicted = [row for row in rows.predicted if row.ladder == last.ladder and row.rung in rungs]
    far = [row.device for row in predicted if row.scale == "full" and row.device != last.machine.device]
    warm_up, steps = STEPS_OF_SCALE[scale]
    run = LadderRun(ladder=ladder, scale=scale, folder=path.parent, machine=last.machine, log=lambda text: None,
                    warm_up=warm_up, steps=steps, gpu=far[-1] if far else None,
                    runners=tuple(dict.fromkeys([OURS, *(row.runner for row in measured)])))
    run.rows = Rows(
        [row.model_copy(update={"key": run.key(rungs[row.rung], row.runner)}) for row in measured],
        [row.model_copy(update={"key": run.predicted_key(rungs[row.rung], row.device, cast(Scale, row.scale))})
         for row in predicted], rows.skipped)  # fmt: skip
    return run


def recorded_ladders() -> list[tuple[LadderRun, Path]]:
    """The recorded ladders, those of GPUs first."""
    found = [(run, path) for path in _files() if (run := recorded(path)) is not None]
    return sorted(found, key=lambda each: (each[0].machine.kind != "cuda", each[1].name))


def _files() -> list[Path]:
    return sorted(records.RESULTS.glob("ladder-*.jsonl"))


def _one(run: LadderRun, path: Path) -> Iterator[str | records.Table]:
    """One recorded ladder: its heading, table, remarks and peers."""
    results, ladder = rung_results(run), run.ladder
    dates = sorted(result.measured.date[:10] for result in results if result.measured is not None)
    yield f"### {ladder.title}, {run.machine.device}"
    yield (". ".join(text[:1].upper() + text[1:] for text in heading(run)[1:])
           + f". Measured {dates[0] if dates[0] == dates[-1] else f'{dates[0]} to {dates[-1]}'}, "
           f"[{path.name}](../results/{path.name}).")
    if path.with_suffix(".png").exists():
        yield f"![{ladder.title}: time, memory and throughput](../results/{path.stem}.png)"
    heads, rows = cells(results)
    yield heads, rows
    if said := [f"- {note}" for note in notes(results)]:
        yield "\n".join(said)
    yield from _peers(results)


def _peers(results: Sequence[RungResult]) -> Iterator[str | records.Table]:
    if rows := [(title_of(each.peer), each.ratio, str(each.rungs), *map(times, each.values))
                for each in spreads(results)]:
        yield ("Ours in a peer's, over the rungs that are the same work: samples a second, above 1 where ours is "
               "faster, and peak memory, below 1 where ours takes less.")
        yield ("peer", "ratio", "rungs", *QUANTILES), rows


def _features(runs: Sequence[tuple[LadderRun, Path]]) -> Iterator[str | records.Table]:
    """The guides' table for each machine, filled from all its ladders."""
    yield "## What each technique gives"
    yield ("The guides say whether a technique improves speed, and memory. Next to their words stand the factors that "
           "were measured: samples a second and peak memory of the rung with the technique, in those of the rung "
           f"without it. The guides, in the order of their words: {'; '.join(guides().guides)}.")
    if not runs:
        yield "Nothing is measured yet."
    for device in dict.fromkeys(run.machine.device for run, _ in runs):
        mine = [run for run, _ in runs if run.machine.device == device]
        found = effects([result for run in mine for result in rung_results(run)])
        yield f"On {device}, {', '.join(f'`{run.ladder.name}` ({run.scale})' for run in mine)}:"
        yield ("technique", "guides: speed", "measured", "guides: memory", "measured", "shown by, speed and memory"), [
            (each.feature, ", ".join(each.words.speed), each.speed, ", ".join(each.words.memory), each.memory,
             _shown_by(each)) for each in found]


def _shown_by(effect: Effect) -> str:
    return "; ".join(f"{shown.name} against {shown.rung.against} ({times(shown.speed)}, {times(shown.memory)})"
                     for shown in effect.shown if shown.speed is not None)


def _full_size() -> Iterator[str | records.Table]:
    """Predictions of published ladders at full size, for the published card."""
    yield "## Full-size prediction against published"
    yield f"Predicted with no such card present; the last column says why one is more than {EXPLAINED:g} % off."
    for ladder in (ladders()[name] for name in FULL_SIZE):
        rows = _full_rows(ladder)
        yield f"### {ladder.title}, {ladder.published_on}"
        if not rows:
            yield "Not yet predicted."
            continue
        memory = "as the driver reports it" if ladder.published_memory == "driver" else "as the allocator counts it"
        yield f"Seconds of a step; memory {memory}. Predicted for `{ladder.gpu}`."
        yield ("rung", "publ. s", "pred. s", "difference", "publ. MiB", "pred. MiB", "difference", "why"), [
            _full_row(ladder, rung, rows[rung.name]) for rung in ladder.rungs
            if any(rung.published) and rung.name in rows]


def _full_rows(ladder: Ladder) -> dict[str, Predicted]:
    """The newest full-size prediction of each rung, for the published card."""
    every = Rows()
    for path in _files():
        for row in read(path).predicted:
            if (row.ladder, row.device, row.scale) == (ladder.name, ladder.gpu, "full"):
                every.add(row)
    return {row.rung: row for row in every.predicted}


def _full_row(ladder: Ladder, rung: Rung, row: Predicted) -> tuple[str, ...]:
    figures = []
    for what, (published, predicted) in _both(ladder, rung, row).items():
        unit = MIB if what == "memory" else 1.0
        figures += [_figure(published, unit), _figure(predicted, unit), _percent(published, predicted)]
    said = [row.reason, "does not fit" if row.fits == "no" else ""]
    said += [f"{what}: {why}" for what, why in _why(ladder, rung).items()]
    return (rung.name, *figures, "; ".join(text for text in said if text))


def _both(ladder: Ladder, rung: Rung, row: Predicted) -> dict[What, tuple[float | None, float | None]]:
    """Seconds of a step and bytes, as published and as predicted."""
    predicted = figures_of(row, ladder)
    return {"time": (rung.published.seconds, predicted.seconds), "memory": (rung.published.memory, predicted.memory)}


def _why(ladder: Ladder, rung: Rung) -> Mapping[What, str]:
    return DIFFERENCES.get(ladder.name, {}).get(rung.name, {})


def differences(ladder: Ladder) -> Iterator[tuple[Rung, What, float]]:
    """Percent that each full-size prediction lies from what was published."""
    rows = _full_rows(ladder)
    for rung in ladder.rungs:
        figures = _both(ladder, rung, rows[rung.name]) if rung.name in rows else {}
        for what, (published, predicted) in figures.items():
            apart = _apart(published, predicted)
            if apart is not None:
                yield rung, what, apart


def unexplained() -> list[str]:
    """Differences above EXPLAINED that nothing is said of."""
    return [f"{ladder.name}, {rung.name}: {what} {apart:+.0f} %"
            for ladder in (ladders()[name] for name in FULL_SIZE) for rung, what, apart in differences(ladder)
            if abs(apart) > EXPLAINED and what not in _why(ladder, rung)]


def _apart(published: float | None, predicted: float | None) -> float | None:
    """Percent that a prediction lies from what was published."""
    return None if published is None or predicted is None else 100 * (predicted - published) / published


def _percent(published: float | None, predicted: float | None) -> str:
    apart = _apart(published, predicted)
    return "" if apart is None else f"{apart:+.1f} %"


def _figure(value: float | None, unit: float) -> str:
    if value is None:
        return ""
    return f"{value / unit:.3g}" if unit == 1.0 else f"{value / unit:,.0f}"

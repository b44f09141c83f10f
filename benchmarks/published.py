"""Predicted speed and memory against training runs that others published, over cards that were not at hand.

Every row of results/published_runs.jsonl that a recipe can express is traced for the card it names, with every field
pinned, and its time and memory are predicted from data sheets alone. Nothing is searched, fitted or run. A speed's
error is predicted over published samples a second, less 1; a driver's figure of memory is held against what the
allocator reserves and the context of the run's own software together, as a plan shows them. Headline figures are of the
grades A and A-, whose settings are stated in full; those of grade B stand apart, and so do runs held out: found, graded
and written down after every constant stood, and predicted once.

Run: python benchmarks/published.py [--only ID] [--sum-up]     about ten minutes on one core; no GPU
With an id, or a part of some, only those rows are made, and nothing is recorded. With --sum-up, rows on record are not
made again, only those that are not, and reasons, the summary and the picture. Written to results/published.json and
published.png.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import record
from published_context import as_loaded
from published_held_to import held_to
from published_intervals import interval, intervals, needed
from published_mfu import utilizations
from published_reasons import reason
from published_recipes import (
    CannotExpress,
    Expressed,
    Row,
    backward_samples_per_second,
    express,
    samples_per_second,
)
from tightfit.backends import load_backend
from tightfit.devices import find_device
from tightfit.errors import TightfitError
from tightfit.planning.estimate import Tools, predict_memory, stage, steps_alone
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.timing.step_time import StepTime
from tightfit.planning.timing.uncertainty import speed_lost, work_error
from tightfit.trace import Trace

RUNS = record.RESULTS / "published_runs.jsonl"
FAR = 0.2
"""An error of which the record tells the reason."""
HEADLINE = ("A", "A-")
GENERATIONS = {(7, 0): "Volta", (7, 5): "Turing", (8, 0): "Ampere, A100", (8, 6): "Ampere", (8, 9): "Ada",
               (9, 0): "Hopper", (10, 0): "Blackwell"}


def published() -> list[Row]:
    """Every row."""
    return [json.loads(line) for line in RUNS.read_text("utf-8").splitlines()]


def time_of(found: Expressed, trace: Trace, tools: Tools) -> StepTime:
    """The time of a row's step, or of its prefill."""
    return tools.step_time(stage(trace, "prefill") if found.recipe.mode == "inference" else trace, found.recipe,
                           found.device)


def speed_of(found: Expressed, timed: StepTime) -> float:
    """Samples a second of the part of a step that was published."""
    passes = timed.forward + timed.recompute + timed.backward
    seconds = {"step": timed.seconds, "forward": timed.forward}.get(found.timed, passes)
    return found.recipe.batch_size / seconds


def compare(row: Row, found: Expressed, trace: Trace, held: Trace, tools: Tools) -> dict[str, Any]:
    """What is recorded of a row that a recipe expresses. held: the trace of `found.held`, for the memory."""
    result: dict[str, Any] = {
        "id": row["id"], "grade": row["grade"], "card": found.device.name, "source": row["source"].split()[0],
        "precision": found.recipe.to_dict()["precision"], "timed": found.timed, "kernels": found.kernels,
        **({"held_out": row["held_out"]} if "held_out" in row else {}),
    }  # fmt: skip
    speed, backward = samples_per_second(row), backward_samples_per_second(row)
    if speed is not None and found.timed != "nothing":
        timed = time_of(found, trace, tools)
        total = sum(timed.work.values())
        unsure = work_error(timed.work, False, speed_lost(total, timed.slower_host) * total) / total
        result["speed"] = {**_pair(speed, speed_of(found, timed)), "work_error": round(unsure, 4)}
        if backward is not None:
            result["backward"] = _pair(backward, found.recipe.batch_size / timed.backward)
    memory = predict_memory(steps_alone(held), found.recipe, found.device, tools)
    if found.memory and "memory_bytes" in row:
        bytes_of = {"allocated": memory.peak_allocated, "reserved": memory.peak_reserved}
        own = bytes_of.get(found.memory, memory.used) + row.get("beside_bytes", 0)  # of what its script keeps as well
        result["memory"] = {"counted": found.memory, **_pair(row["memory_bytes"], own),
                            "allocated": memory.peak_allocated, "reserved": memory.peak_reserved,
                            "context": memory.context}
    if found.fits:
        ran = not row.get("oom", False)
        result["fits"] = {"published": ran, "predicted": memory.verdict, "agree": ran == memory.fit_rank.fits}
    return {**result, "notes": list(found.notes)}


def with_reasons(row: dict[str, Any]) -> dict[str, Any]:
    """A compared row, with the reason beside each figure that is far off."""
    for figure in ("speed", "memory"):
        if figure in row:
            row[figure].pop("reason", None)
            if abs(row[figure]["error"]) > FAR:
                row[figure]["reason"] = reason(figure, row)
    return row


def _pair(published: float, predicted: float) -> dict[str, float]:
    return {"published": published, "predicted": round(predicted, 4), "error": round(predicted / published - 1, 4)}


def run(rows: Iterable[Row]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Every row compared, and what cannot be, with the reason. Each trace is made once; each row prints a line."""
    backend = load_backend("pytorch")
    tools = standard_tools(backend)
    expressed, left_out = [], []
    for row in rows:
        try:
            expressed.append((row, express(row)))
        except CannotExpress as why:
            left_out.append({"id": row["id"], "grade": row["grade"], "why": str(why)})
    compared: list[dict[str, Any]] = []
    latest: tuple[tuple[str, str], Trace] | None = None

    def traced(found: Expressed) -> Trace:
        nonlocal latest
        if latest is None or latest[0] != found.key:
            latest = None
            gc.collect()  # before the next one: traces are large
            latest = found.key, tools.predict(found.recipe, found.device)
        return latest[1]

    def of_its_software(row: Row, found: Expressed, trace: Trace) -> Trace:
        untraced = backend.untraced(found.recipe, found.device, trace)
        return replace(trace, untraced=as_loaded(untraced, found.device, row.get("versions", "")))

    for number, (row, found) in enumerate(sorted(expressed, key=lambda pair: pair[1].key), 1):
        try:
            trace = traced(found)
            held = trace if found.held == found.recipe else tools.predict(found.held, found.device)
            held = of_its_software(row, found, held)
            compared.append(with_reasons(compare(row, found, trace, held, tools)))
        except TightfitError as why:  # its failure is a row's result
            left_out.append({"id": row["id"], "grade": row["grade"], "why": f"failed: {why}"})
            continue
        print(f"{number}/{len(expressed)} {_told(compared[-1])}", flush=True)
    return compared, left_out


def _in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order in which they were published here."""
    order = {row["id"]: place for place, row in enumerate(published())}
    return sorted(rows, key=lambda row: order[row["id"]])


def _told(row: dict[str, Any]) -> str:
    figures = [f"{figure} {row[figure]['error']:+.1%}" for figure in ("speed", "memory") if figure in row]
    wrong = [] if row.get("fits", {}).get("agree", True) else [f"fits: {row['fits']['predicted']}, which is wrong"]
    return f"{row['id']}: {', '.join([*figures, *wrong]) or 'as published'}"


def spread(errors: Sequence[float]) -> dict[str, Any]:
    """Errors without sign, and the median with it."""
    ordered = sorted(map(abs, errors))
    return {
        "rows": len(ordered), "median": round(statistics.median(ordered), 4),
        "p95": round(ordered[math.ceil(0.95 * len(ordered)) - 1], 4), "worst": round(ordered[-1], 4),
        "median_with_sign": round(statistics.median(errors), 4),
        "within_20_percent": sum(error <= FAR for error in ordered),
    }  # fmt: skip


def grouped(rows: Iterable[dict[str, Any]], figure: str, by: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    """The spread of each group's errors."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if figure in row:
            groups[by(row)].append(row[figure]["error"])
    return {name: spread(errors) for name, errors in sorted(groups.items())}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors over all rows of the headline's grades, and by what may explain them; whether all of any grade fit."""
    best = [row for row in rows if row["grade"] in HEADLINE]
    plain = [row for row in best if not row["kernels"]]
    outcomes = [row["fits"] for row in rows if "fits" in row]
    return {
        "speed": {
            **grouped(best, "speed", lambda row: "all"),
            "by_kernels": grouped(best, "speed", lambda row: "special" if row["kernels"] else "plain"),
            "by_grade": grouped(rows, "speed", lambda row: row["grade"]),
            "by_source": grouped(best, "speed", lambda row: row["source"]),
            "by_timed": grouped(best, "speed", lambda row: row["timed"]),
            "by_precision": grouped(best, "speed", lambda row: _name(row["precision"])),
            "by_card": grouped(best, "speed", lambda row: row["card"]),
            "plain_by_card": grouped(plain, "speed", lambda row: row["card"]),
        },
        "intervals": intervals(best),
        "memory": {
            **grouped(best, "memory", lambda row: row["memory"]["counted"]),
            "plain": grouped(plain, "memory", lambda row: row["memory"]["counted"]),
            "by_grade": grouped(rows, "memory", lambda row: f"{row['grade']} {row['memory']['counted']}"),
            "by_card": grouped(best, "memory", lambda row: row["card"]),
        },
        "fits": {"rows": len(outcomes), "agree": sum(fits["agree"] for fits in outcomes),
                 "ran": sum(fits["published"] for fits in outcomes),
                 "ran_and_refused": [row["id"] for row in rows if _wrong(row, ran=True)],
                 "failed_and_allowed": [row["id"] for row in rows if _wrong(row, ran=False)]},
    }


def held_out(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the runs of every grade that were found after all constants stood, by source."""
    timed = [row for row in rows if "speed" in row]
    fits = [row["fits"] for row in rows if "fits" in row]
    return {
        "runs": len(rows),
        "speed": {**grouped(rows, "speed", lambda row: "all"), **grouped(rows, "speed", _source)},
        "memory": {**grouped(rows, "memory", lambda row: "all"), **grouped(rows, "memory", _source)},
        "speeds_inside_their_interval": sum(needed(row) <= interval(row) for row in timed),
        "fits": {"rows": len(fits), "agree": sum(each["agree"] for each in fits)},
    }


def _source(row: dict[str, Any]) -> str:
    """What a held-out run's id begins with: one script's runs, or one table's."""
    return str(row["id"].partition("-")[0])


def _name(value: Any) -> str:
    if isinstance(value, dict):
        return "tf32" if value.get("tf32") else str(value["name"])
    return str(value)


def _wrong(row: dict[str, Any], ran: bool) -> bool:
    return "fits" in row and not row["fits"]["agree"] and row["fits"]["published"] == ran


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Predicted against published speed, coloured by the cards' generation."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if "speed" in row]
    speeds = [row["speed"][name] for row in timed for name in ("published", "predicted")]
    low, high = min(speeds) / 1.3, max(speeds) * 1.3
    figure = Figure(figsize=(7.2, 6.4), layout="constrained")
    axes = figure.subplots()
    axes.fill_between([low, high], [low * (1 - FAR), high * (1 - FAR)], [low * (1 + FAR), high * (1 + FAR)],
                      color="0.92", label="within 20 %")
    axes.plot([low, high], [low, high], color="0.4", linewidth=1)
    for place, (capability, generation) in enumerate(GENERATIONS.items()):
        mine = [row for row in timed if find_device(row["card"]).capability == capability]
        axes.scatter([], [], color=f"C{place}", s=26, label=generation)
        for row in mine:
            axes.scatter(row["speed"]["published"], row["speed"]["predicted"], s=26, linewidths=0.8,
                         marker="^" if row["kernels"] else "o", edgecolors=f"C{place}",
                         c=f"C{place}" if row["grade"] in HEADLINE else "none")
    axes.scatter([], [], marker="^", color="0.4", s=26, label="special kernels ran")
    axes.scatter([], [], marker="o", c="none", edgecolors="0.4", s=26, label="of grade B")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), xlabel="published, samples/s",
             ylabel="predicted from data sheets, samples/s", title="Training runs that others published")
    axes.legend(fontsize=7, loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="make the rows whose id holds this, and record nothing")
    parser.add_argument("--sum-up", action="store_true", help="keep the rows on record, and make those that are not")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    began = time.perf_counter()
    kept: dict[str, Any] = {"rows": [], "left_out": [], "seconds": 0}
    if asked.sum_up:
        kept = json.loads((record.RESULTS / "published.json").read_text("utf-8"))
    known = {row["id"] for row in (*kept["rows"], *kept["left_out"])}
    made, refused = run(row for row in published() if asked.only in row["id"] and row["id"] not in known)
    compared, left_out = _in_order([*map(with_reasons, kept["rows"]), *made]), _in_order([*kept["left_out"], *refused])
    mfu = kept["mfu"] if asked.sum_up else [] if asked.only else utilizations()
    seconds = kept["seconds"] + round(time.perf_counter() - began)
    if asked.only:
        print(json.dumps({"rows": compared, "left_out": left_out}, indent=1))
        return
    known_before = [row for row in compared if "held_out" not in row]
    totals, lines = summary(known_before), held_to(known_before, HEADLINE)
    print(record.write("published", {"seconds": seconds, "held_to": lines, "summary": totals,
                                     "held_out": held_out([row for row in compared if "held_out" in row]), "mfu": mfu,
                                     "rows": compared, "left_out": left_out}))
    draw(known_before, record.RESULTS / "published.png")
    print(json.dumps({"held_to": lines, "intervals": totals["intervals"]}, indent=1))


if __name__ == "__main__":
    main()

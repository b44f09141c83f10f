"""How `plan_vs_gpu.py` goes through its cases: rows that last, plans made side by side, measurements one by one."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import gpu_truth
import record
from forking import Job, Outcome, run_forked
from gpu_cases import Case, all_cases, smoke_cases, write_configurations
from gpu_plans import GpuPlans
from gpu_predictions import device_of, predict_case
from gpu_summary import lines, plot, summarize
from tightfit.calibration import Calibration, load
from tightfit.devices import Device, find_device
from tightfit.errors import Refused
from tightfit.ladder.rows import append

PLANNING_SHARE = 0.5
"""Of the time there is, for planning, at most."""
PLANNING_SECONDS, CASE_SECONDS, COMPILING_SECONDS = 120.0, 60.0, 180.0
TRIED = 3
"""A case that failed so often is left alone."""
COMPILED_AT_ONCE = 4
"""Cases whose compilers run side by side, before each is measured by itself."""

Row = dict[str, Any]


class Rows:
    """The file of rows, of one device: the newest of each case."""

    def __init__(self, path: Path, device: Mapping[str, Any]) -> None:
        self.path, self.device = path, device
        rows = record.rows_of(path)
        self.newest = {row["key"]: row for row in rows if row["device"]["name"] == device["name"]}

    def add(self, case: Case, **values: Any) -> Row:
        attempts = self.attempts(case) + 1
        row = {"key": case.key, "name": case.name, "group": case.group, "line": case.line, "attempts": attempts,
               "device": self.device, "date": datetime.now(UTC).date().isoformat(), **values}
        self.newest[case.key] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append(self.path, row)
        return row

    def measured(self, case: Case) -> bool:
        return bool(self.newest.get(case.key, {}).get("measured"))

    def attempts(self, case: Case) -> int:
        return int(self.newest.get(case.key, {}).get("attempts", 0))

    def of(self, cases: Iterable[Case]) -> list[Row]:
        return [self.newest[case.key] for case in cases if case.key in self.newest]


def left_to_do(cases: Iterable[Case], rows: Rows) -> list[Case]:
    """Cases without a measurement, those that failed before at the end."""
    waiting = [case for case in cases if not rows.measured(case) and rows.attempts(case) < TRIED]
    return sorted(waiting, key=rows.attempts)


def plan_all(
    cases: Iterable[Case], device: Device, folder: Path, rows: Rows, at_once: int, deadline: float
) -> dict[Case, Row]:
    """Predictions of the cases that can run here, those made before and as many more as there is time for; the others'
    reasons become rows."""
    cases, ready = list(cases), GpuPlans("plan_vs_gpu", device).newest
    made = {case: ready[case.key] for case in cases if case.key in ready}
    named = {case.name: case for case in cases if case not in made}
    calibration = with_host(calibration_of(device), rows.device)
    jobs = (Job(name, partial(predict_case, case, case.recipe(folder), device, calibration), PLANNING_SECONDS)
            for name, case in named.items())
    for outcome in run_forked(jobs, at_once, deadline):
        case, value = named[outcome.name], outcome.value or {"failure": outcome.failure}
        if "fits" in value:
            made[case] = value
        else:
            reason = "refused" if "refused" in value else "failure"
            rows.add(case, **{reason: value[reason] if reason == "refused" else f"planning: {value[reason]}"})
            print(f"{reason}: {case.name}: {' '.join(value[reason].split())[-300:]}", flush=True)
    return {case: made[case] for case in cases if case in made}


def plan_ahead(gpu: str, workers: int, only: str = "") -> None:
    """Plan the cases for a card of the catalogue, and keep the plans for a machine that has it."""
    device = find_device(gpu)
    plans = GpuPlans("plan_vs_gpu", device)
    named = {case.name: case for case in all_cases()
             if case.key not in plans.newest and only in f"{case.group} {case.name}"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_configurations(folder)
        jobs = (Job(name, partial(predict_case, case, case.recipe(folder), device, None), PLANNING_SECONDS)
                for name, case in named.items())
        for outcome in run_forked(jobs, workers):
            value = outcome.value or {"failure": outcome.failure}
            if "fits" in value:
                plans.add(named[outcome.name].key, value)
            else:
                print(f"{outcome.name}: {' '.join(str(value.get('refused') or value['failure']).split())[-300:]}")
    print(f"{len(plans.newest)} plans in {plans.path}")


def calibration_of(device: Device) -> Calibration | None:
    """This device's, as measured and kept on this machine, or as recorded in results/."""
    kept = load(device.name, threads=device.units if device.kind == "cpu" else 0)
    path = record.RESULTS / f"calibration-{record.slug(device.name)}.json"
    if kept is None and device.kind == "cuda" and path.exists():
        recorded = TypeAdapter(Calibration).validate_python(json.loads(path.read_text())["calibration"])
        kept = recorded if recorded.device == device.name else None
    return kept


def with_host(calibration: Calibration | None, facts: Mapping[str, Any]) -> Calibration | None:
    """A card's calibration with the host that a measurement had; with none where that is not known."""
    return calibration and replace(calibration, host=facts.get("host", calibration.host) or {})


def measure_all(plans: Mapping[Case, Row], device: Device, folder: Path, rows: Rows, deadline: float) -> None:
    """Measure one case after another; each becomes a row."""
    plain = [case for case in plans if not case.compiles]
    compiled = [case for case in plans if case.compiles]
    _measure(plain, plans, device, folder, rows, deadline)
    for few in (compiled[start : start + COMPILED_AT_ONCE] for start in range(0, len(compiled), COMPILED_AT_ONCE)):
        if device.kind == "cuda":  # what compilers make is kept, so that compiling does not come one by one
            largest = max(plans[case]["limit"] for case in few)
            at_once = max(min((os.cpu_count() or 1) // 4, device.memory_bytes // largest), 1)
            for _ in run_forked(_jobs(few, plans, device, folder), at_once, deadline):
                pass
        _measure(few, plans, device, folder, rows, deadline)


def _measure(
    cases: Iterable[Case], plans: Mapping[Case, Row], device: Device, folder: Path, rows: Rows, deadline: float
) -> None:
    named = {case.name: case for case in cases}
    for outcome in run_forked(_jobs(named.values(), plans, device, folder), 1, deadline):
        case = named[outcome.name]
        values = {"measured": outcome.value} if outcome.failure is None else {"failure": outcome.failure}
        rows.add(case, recipe=case.recipe(folder).to_dict(), predicted=plans[case], seconds=outcome.seconds, **values)
        print(said(case, plans[case], outcome), flush=True)


def _jobs(cases: Iterable[Case], plans: Mapping[Case, Row], device: Device, folder: Path) -> Iterator[Job]:
    for case in cases:
        others = gpu_truth.used_bytes() if device.kind == "cuda" else None
        work = partial(gpu_truth.measure, case.recipe(folder), device, plans[case]["limit"],
                       expandable=case.expandable, others=others)
        yield Job(case.name, work, COMPILING_SECONDS if case.compiles else CASE_SECONDS)


def said(case: Case, plan: Row, outcome: Outcome) -> str:
    """A measurement in one line."""
    if outcome.failure is not None:
        return f"FAILED {case.name}: {' '.join(outcome.failure.split())[-300:]}"
    found, parts = outcome.value, [f"planned {plan['fits']}: {outcome.value['outcome']}"]
    if "peak_reserved" in found:
        parts.append(f"reserved {plan['peak_reserved'] / 2**20:,.0f} MiB planned, "
                     f"{found['peak_reserved'] / 2**20:,.0f} measured")
    if "step_seconds" in found:
        best = plan["step_seconds"]["calibrated"] or plan["step_seconds"]["uncalibrated"]
        parts.append(f"step {best * 1e3:.1f} ms planned, {found['step_seconds'] * 1e3:.1f} measured")
    return f"{case.name}: {', '.join(parts)} ({outcome.seconds:.0f} s)"


def plan_again(cases: Iterable[Case], device: Device, folder: Path, rows: Rows, at_once: int) -> list[Row]:
    """The measured rows with what is planned now, with the memory that they were measured with."""
    calibration = calibration_of(device)
    named = {case.name: case for case in cases if rows.measured(case)}
    jobs = (Job(name, partial(predict_case, case, case.recipe(folder), device, with_host(calibration, row["device"]),
                              row["predicted"]["limit"]), PLANNING_SECONDS)
            for name, case in named.items() if (row := rows.newest[case.key]))
    found = []
    for outcome in run_forked(jobs, at_once):
        row, value = rows.newest[named[outcome.name].key], outcome.value or {"failure": outcome.failure}
        if "fits" in value:
            found.append({**row, "predicted": value})
        else:
            found.append({**row, "measured": None, "failure": value.get("failure") or value.get("refused")})
    return found


def write_summary(
    rows: Iterable[Row], planned: int, path: Path, device: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Print it, and write it beside the rows, with a figure where something was measured. more: what else to tell."""
    rows = list(rows)
    summary = summarize(rows, planned)
    print("\n".join(lines(summary, rows)))
    short = ("name", "group", "predicted", "measured", "date")
    cases = [{field: row[field] for field in short} for row in rows if row.get("measured")]
    name = f"{path.stem}-{record.slug(device['name'])}"
    print(record.write(name, {"gpu": device, **summary, **more, "cases": cases}, path.parent))
    if any(row["measured"].get("peak_reserved") for row in cases):
        plot(rows, path.with_name(f"{name}.png"), f"predicted against measured, {device['name']}")
    return summary


def on_gpu() -> Row:
    """The CUDA device's facts, from a child. Raises Refused where there is none."""
    outcome = next(run_forked([Job("device", gpu_truth.describe_device, CASE_SECONDS)]))
    if outcome.failure is not None:
        raise Refused(f"no CUDA device can be used here: {outcome.failure.splitlines()[-1]}")
    facts: Row = outcome.value
    return facts


def run_again(rows_path: Path, workers: int) -> None:
    """Plan what was measured once more, of each device, and sum it up. Raises Refused where nothing was."""
    devices = {row["device"]["name"]: row["device"] for row in record.rows_of(rows_path)}
    if not devices:
        raise Refused(f"{rows_path} holds no measurement to plan again")
    every = all_cases()
    with tempfile.TemporaryDirectory() as name:
        write_configurations(Path(name))
        for facts in devices.values():
            rows = Rows(rows_path, facts)
            first = summarize(rows.of(every), len(every))
            write_summary(plan_again(every, device_of(facts), Path(name), rows, workers), len(every), rows_path, facts,
                          first_planned={field: first[field] for field in ("errors", "false_fits")})


def run(
    rows_path: Path, *, on_cpu: bool = False, smoke: bool = False, part: tuple[int, int] = (1, 1), only: str = "",
    compiles: bool = True, seconds: float = 450.0, workers: int = 1,
) -> dict[str, Any]:
    """Measure what is left of a part of the cases, and sum up what is known of all. Raises Refused without a device.

    only: what a case's group or name has in it. compiles: whether cases that compile are among them. seconds: nothing
    is begun or goes on after them. workers: plans made at once.
    """
    deadline = time.monotonic() + seconds
    every = smoke_cases() if on_cpu or smoke else all_cases()
    number, count = part
    cases = [case for case in every[number - 1 :: count]
             if only in f"{case.group} {case.name}" and (compiles or not case.compiles)]
    facts = gpu_truth.facts_of(gpu_truth.cpu()) if on_cpu else on_gpu()
    if not on_cpu:
        facts["host"] = next(run_forked([Job("host", gpu_truth.host_now, CASE_SECONDS)])).value
    rows, device = Rows(rows_path, facts), device_of(facts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_configurations(folder)
        half = time.monotonic() + PLANNING_SHARE * (deadline - time.monotonic())
        plans = plan_all(left_to_do(cases, rows), device, folder, rows, workers, half)
        print(f"{len(plans)} cases are planned, after {time.monotonic() - deadline + seconds:.0f} s", flush=True)
        measure_all(plans, device, folder, rows, deadline)
    summary = write_summary(rows.of(every), len(every), rows_path, facts)
    left = [case for case in left_to_do(cases, rows) if "refused" not in rows.newest.get(case.key, {})]
    if left:
        print(f"{len(left)} cases of this part are left; run it again to go on")
    return summary

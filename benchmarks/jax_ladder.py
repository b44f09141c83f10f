"""The notebook's ladder compiled for its own card, which need not be present, and recipes that take less: JAX.

Each rung's bytes are XLA's own plan of the very step that training runs. Operations are those of the matrix products in
the compiled program, recomputation included; findings are those of the report. Records results/jax_ladder_a5000.json.
Run: python benchmarks/jax_ladder.py
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import record
from tightfit.backends.jax.backend import JaxBackend
from tightfit.devices import MIB, find_device
from tightfit.ladder.catalogue import ladders
from tightfit.ladder.rungs import Rung
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import estimate
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.targets import Target
from tightfit.profiling.findings import findings
from tightfit.profiling.measure import predicted_profile
from tightfit.system import cores, installed

GPU = "rtx-a5000"
LIBRARIES = ("jax", "jaxlib", "optax", "jax-cuda12-plugin", "jax-cuda12-pjrt")


def compiled(rung: Rung, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A rung's figures: bytes, seconds, operations, and the published figures."""
    backend, device = JaxBackend(), find_device(GPU)
    recipe = resolve(ladders()["transformer-156m-jax"].recipe(rung, overrides=overrides), device)
    trace = backend.predict(recipe, device)
    found = estimate(trace, recipe, device, standard_tools(backend))
    profile, _ = predicted_profile(recipe, Target(device=device), print)
    figures = {
        "rung": rung.name, "changes": dict(rung.changes), "predicted_bytes": found.memory.peak_allocated,
        "predicted_mib": round(found.memory.peak_allocated / MIB, 1),
        "by_category": dict(found.memory.by_category), "peak_in": found.memory.peak_in,
        "operations": sum(op.flops for op in trace.ops), "predicted_seconds": round(found.time.step_seconds, 3),
        "findings": [finding.sentence for finding in findings(profile)],
    }  # fmt: skip
    if rung.published.memory is not None:
        error = found.memory.peak_allocated / rung.published.memory - 1
        figures |= {"published_mib": rung.published.memory / MIB, "published_seconds": rung.published.seconds,
                    "memory_error": round(error, 4)}
    return figures


def ladder(overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Every rung, several side by side. overrides: `key=value` texts for every rung's recipe."""
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(partial(compiled, overrides=overrides), ladders()["transformer-156m-jax"].rungs))


def main() -> None:
    rungs = ladder()
    for rung in rungs:
        published = f"{rung['published_mib']:8,.0f} ({rung['memory_error']:+.1%})" if "published_mib" in rung else ""
        print(f"{rung['rung']:46} {rung['predicted_mib']:9,.1f} MiB {rung['operations'] / 1e12:6.1f} TFLOP "
              f"{rung['predicted_seconds']:.3f} s  {published}")
    print(record.write("jax_ladder_a5000", {"gpu": GPU, "versions": installed(LIBRARIES), "rungs": rungs}))


if __name__ == "__main__":
    main()

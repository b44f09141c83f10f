"""The ceilings of the machine at hand, measured and kept as `tightfit doctor --calibrate` does, and recorded.

Run: python benchmarks/ceilings.py   (the CUDA device where there is one, else the CPU; a minute at most)
"""

from __future__ import annotations

import time
from dataclasses import asdict

import record
from tightfit.doctor.calibrate import calibrate, ceiling_rows


def main() -> None:
    began = time.perf_counter()
    ceilings, path = calibrate("auto")
    seconds = time.perf_counter() - began
    for name, figure in ceiling_rows(ceilings):
        print(f"{name:24} {figure}")
    print(f"{seconds:.0f} seconds; kept in {path}")
    name = "ceilings_gpu" if ceilings.kind == "cuda" else "ceilings"
    print(record.write(name, {"seconds": seconds, "ceilings": asdict(ceilings)}))


if __name__ == "__main__":
    main()

"""The calibration of the machine at hand, measured and kept as `tightfit doctor --calibrate` does, and recorded.

Run: python benchmarks/calibration.py   (the CUDA device where there is one, else the CPU; a minute at most)
"""

from __future__ import annotations

import time
from dataclasses import asdict

import record
from tightfit.doctor.calibrate import calibrate, calibration_rows


def main() -> None:
    began = time.perf_counter()
    calibration, path = calibrate("auto")
    seconds = time.perf_counter() - began
    for name, figure in calibration_rows(calibration):
        print(f"{name:24} {figure}")
    print(f"{seconds:.0f} seconds; kept in {path}")
    name = f"calibration-{record.device_slug()}" if calibration.kind == "cuda" else "calibration"
    print(record.write(name, {"seconds": seconds, "calibration": asdict(calibration)}))


if __name__ == "__main__":
    main()
